// The choice of a reader.
#include "reader.h"

namespace colibri {
namespace {

constexpr bool kUringFirst = false;  // what ReaderKind::automatic prefers where the kernel permits it

}  // namespace

std::unique_ptr<BlockReader> make_reader(ReaderKind kind, const FileSet& files, int depth, ReadHooks& hooks) {
    const bool uring = kind == ReaderKind::uring || (kind == ReaderKind::automatic && kUringFirst && uring_refusal().empty());
    return hooks.wrap(uring ? make_uring_reader(files, depth, hooks) : make_pread_pool(files, depth, hooks));
}

}  // namespace colibri
