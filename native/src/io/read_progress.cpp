// The rule for short, interrupted and failed reads, and calls made with pread.
#include "read_progress.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "file_set.h"

namespace colibri {
namespace {

constexpr int kStallLimit = 8;                   // calls in a row that deliver something but less than one block, or EAGAIN
constexpr uint64_t kLargestCall = 0x7FFF'F000u;  // the kernel's own bound; a multiple of kBlock

}  // namespace

ReadCall ReadProgress::next() {
    result_.retries = calls_++;
    // A direct read must start at a block: after a short one that did not end at a block, the rest is read again.
    at_ = files_->direct() ? align_down(result_.arrived) : result_.arrived;
    return {request_.file, files_->fd(request_.file), request_.into + at_, std::min(request_.length - at_, kLargestCall),
            request_.offset + at_};
}

void ReadProgress::take(int64_t outcome) {
    if (outcome == -EINTR) return;
    if (outcome == -EAGAIN && ++refused_ < kStallLimit) return;
    if (outcome < 0) {
        result_.error = static_cast<int>(-outcome);
        return end(ReadResult::Outcome::failed);
    }
    refused_ = 0;
    const uint64_t reached = at_ + static_cast<uint64_t>(outcome);
    result_.transferred += static_cast<uint64_t>(outcome);
    if (outcome == 0) return end(ReadResult::Outcome::end_of_file);
    stalled_ = reached > result_.arrived ? 0 : stalled_ + 1;
    if (stalled_ && ended(reached)) return end(ReadResult::Outcome::end_of_file);
    if (stalled_ == kStallLimit) return end(ReadResult::Outcome::stalled);
    result_.arrived = std::max(result_.arrived, reached);
}

// A file that was cut inside a block delivers the same short read again and again.
bool ReadProgress::ended(uint64_t reached) const {
    struct stat status{};
    return ::fstat(files_->fd(request_.file), &status) == 0 && static_cast<uint64_t>(status.st_size) <= request_.offset + reached;
}

int64_t owned_up(const ReadCall& call, const Tampering& tampering, int64_t outcome) {
    if (outcome < 0 || static_cast<uint64_t>(outcome) <= tampering.most) return outcome;
    // A direct read of part of a block is refused, so the whole was read; what is denied now must not be used.
    std::memset(call.into + tampering.most, 0xA5, static_cast<uint64_t>(outcome) - tampering.most);
    return static_cast<int64_t>(tampering.most);
}

int64_t read_now(ReadCall call, ReadHooks& hooks) {
    const Tampering tampering = hooks.tamper(call);
    if (tampering.instead) return *tampering.instead;
    if (tampering.delay) std::this_thread::sleep_for(std::chrono::microseconds(tampering.delay));
    const ssize_t got = ::pread(call.fd, call.into, call.count, static_cast<off_t>(call.offset + tampering.further));
    return owned_up(call, tampering, got < 0 ? -int64_t{errno} : int64_t{got});
}

}  // namespace colibri
