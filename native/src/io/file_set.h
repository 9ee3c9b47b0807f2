// The files that experts are read from, opened for direct reads where all of them allow it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reader.h"

namespace colibri {

class FileSet {
  public:
    // Throws Error("MissingFileError"), Error("ReadError"). Direct reads are tried on each file, not only asked for.
    FileSet(std::vector<std::string> paths, bool direct, ReadHooks& hooks);
    ~FileSet();
    FileSet(const FileSet&) = delete;
    FileSet& operator=(const FileSet&) = delete;

    int count() const { return static_cast<int>(paths_.size()); }
    int fd(int file) const { return fds_[static_cast<size_t>(file)]; }
    const std::string& path(int file) const { return paths_[static_cast<size_t>(file)]; }
    uint64_t size(int file) const { return sizes_[static_cast<size_t>(file)]; }
    bool direct() const { return reason_.empty(); }
    std::string description() const { return direct() ? "direct" : "buffered (" + reason_ + ")"; }

  private:
    bool open_direct(ReadHooks& hooks);
    void open_buffered();
    void close_all();

    std::vector<std::string> paths_;
    std::vector<int> fds_;
    std::vector<uint64_t> sizes_;
    std::string reason_;  // why reads are buffered
};

}  // namespace colibri
