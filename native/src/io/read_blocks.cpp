// A queue of blocks, always as full as it may be.
#include "read_blocks.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>

#include "../cache/arena.h"
#include "colibri/error.h"
#include "file_set.h"

namespace colibri {
namespace {

constexpr int kWaiting = 2;  // requests past those in flight, as in the store

void check(const char* option, uint64_t value, uint64_t unit, uint64_t largest) {
    if (value % unit || value > largest)
        throw Error("OptionError", "option outside its domain", option,
                    "a multiple of " + std::to_string(unit) + ", at most " + std::to_string(largest), std::to_string(value));
}

uint64_t checksum(const uint8_t* data, uint64_t bytes) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < bytes / sizeof sum; ++i) {
        uint64_t word = 0;
        std::memcpy(&word, data + i * sizeof word, sizeof word);
        sum += (2 * i + 1) * word;
    }
    return sum;
}

class BlockQueue final : public ReadCompletion {
  public:
    BlockQueue(std::span<const uint64_t> offsets, uint64_t length, bool checksums, int buffers)
        : offsets_(offsets),
          length_(length),
          checksums_(checksums ? offsets.size() : 0),
          buffer_of_(offsets.size()),
          arena_(static_cast<uint64_t>(buffers) * length) {
        std::memset(arena_.at(0), 1, static_cast<uint64_t>(buffers) * length);
        for (int i = buffers; i-- > 0;) free_.push_back(arena_.at(static_cast<uint64_t>(i) * length));
    }

    void run(BlockReader& reader) {
        std::unique_lock lock(mutex_);
        reader_ = &reader;
        fill();
        changed_.wait(lock, [this] { return outstanding_ == 0; });
    }

    void read_done(int block, const ReadResult& result) noexcept override {
        const auto at = static_cast<size_t>(block);
        if (!checksums_.empty()) checksums_[at] = checksum(buffer_of_[at], length_);
        const std::lock_guard lock(mutex_);
        transferred_ += result.transferred;
        retries_ += result.retries;
        if (result.outcome != ReadResult::Outcome::ok && !failure_) failure_ = {block, result};
        free_.push_back(buffer_of_[at]);
        --outstanding_;
        fill();
        if (outstanding_ == 0) changed_.notify_one();
    }

    // Throws Error("ReadError") where a block could not be read.
    void finish(const std::string& path, BlockReads* into) {
        if (failure_) {
            const auto& [block, result] = *failure_;
            throw Error("ReadError", "read of a block failed",
                        path + ", offset " + std::to_string(offsets_[static_cast<size_t>(block)] + result.arrived),
                        std::to_string(length_) + " bytes", result.error ? std::strerror(result.error) : "end of file");
        }
        into->transferred = transferred_;
        into->retries = retries_;
        into->checksums = std::move(checksums_);
    }

  private:
    // The caller holds the mutex. Nothing new starts after a failure.
    void fill() {
        for (; next_ < offsets_.size() && !free_.empty() && !failure_; ++next_) {
            buffer_of_[next_] = free_.back();
            free_.pop_back();
            ++outstanding_;
            reader_->submit({0, offsets_[next_], length_, length_, buffer_of_[next_], this, static_cast<int>(next_)});
        }
    }

    std::span<const uint64_t> offsets_;
    uint64_t length_;
    std::vector<uint64_t> checksums_;
    std::vector<uint8_t*> buffer_of_;
    Arena arena_;
    BlockReader* reader_ = nullptr;

    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    std::vector<uint8_t*> free_;
    size_t next_ = 0;
    size_t outstanding_ = 0;
    uint64_t transferred_ = 0, retries_ = 0;
    std::optional<std::pair<int, ReadResult>> failure_;
};

}  // namespace

BlockReads read_blocks(const std::string& path, std::span<const uint64_t> offsets, uint64_t length, bool direct, ReaderKind kind,
                       int depth, bool checksums) {
    check("length", length, kBlock, uint64_t{1} << 32);
    check("depth", static_cast<uint64_t>(depth), 1, 256);
    check("offsets", offsets.size(), 1, uint64_t{1} << 30);
    for (const uint64_t offset : offsets) check("offsets", offset, kBlock, uint64_t{1} << 62);
    if (!length || !depth) throw Error("OptionError", "nothing to read with", length ? "depth" : "length", "1 or more", "0");

    ReadHooks none;
    const FileSet files({path}, direct, none);
    const int buffers =
        static_cast<int>(std::min<size_t>(static_cast<size_t>(depth + kWaiting), std::max<size_t>(offsets.size(), 1)));
    BlockQueue queue(offsets, length, checksums, buffers);
    const std::unique_ptr<BlockReader> reader = make_reader(kind, files, depth, none);
    BlockReads done;
    const auto begin = std::chrono::steady_clock::now();
    queue.run(*reader);
    done.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    queue.finish(path, &done);
    done.reader = files.description() + ", " + reader->name();
    return done;
}

}  // namespace colibri
