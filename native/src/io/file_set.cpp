// Opening files: O_DIRECT with a trial read, or buffered and why.
#include "file_set.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "colibri/error.h"
#include "read_progress.h"

namespace colibri {
namespace {

int open_or_throw(const std::string& path, int flags) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
    if (fd >= 0 || flags) return fd;
    if (errno == ENOENT) throw Error("MissingFileError", "file of expert weights", path, "a file", "nothing");
    throw Error("ReadError", "file cannot be opened", path, "readable", std::strerror(errno));
}

}  // namespace

FileSet::FileSet(std::vector<std::string> paths, bool direct, ReadHooks& hooks) : paths_(std::move(paths)) {
    try {
        if (!direct) reason_ = "direct reads switched off";
        if (!direct || !open_direct(hooks)) open_buffered();
        for (size_t i = 0; i < paths_.size(); ++i) {
            struct stat status{};
            if (::fstat(fds_[i], &status)) throw Error("ReadError", "file has no size", paths_[i], "", std::strerror(errno));
            sizes_.push_back(static_cast<uint64_t>(status.st_size));
        }
    } catch (...) {
        close_all();
        throw;
    }
}

FileSet::~FileSet() { close_all(); }

void FileSet::close_all() {
    for (const int fd : fds_) ::close(fd);
    fds_.clear();
}

void FileSet::open_buffered() {
    for (const std::string& path : paths_) fds_.push_back(open_or_throw(path, 0));
}

bool FileSet::open_direct(ReadHooks& hooks) {
#ifdef O_DIRECT
    alignas(kBlock) uint8_t trial[kBlock];
    for (size_t i = 0; i < paths_.size(); ++i) {
        const int fd = open_or_throw(paths_[i], O_DIRECT);
        if (fd >= 0) fds_.push_back(fd);
        int64_t outcome = fd < 0 ? -int64_t{errno} : -EINTR;
        while (outcome == -EINTR) outcome = read_now({static_cast<int>(i), fd, trial, kBlock, 0}, hooks);
        if (outcome >= 0) continue;
        reason_ = paths_[i] + ": O_DIRECT: " + std::strerror(static_cast<int>(-outcome));
        close_all();
        return false;
    }
    return true;
#else
    (void)hooks;
    reason_ = "this system has no O_DIRECT";
    return false;
#endif
}

}  // namespace colibri
