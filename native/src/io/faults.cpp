// Faulty system calls and completions in reverse order.
#include "faults.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>

#include "colibri/error.h"

namespace colibri {
namespace {

// Holds completions back until no request is without one. A request that comes while some are held back joins them.
class ReversingReader final : public BlockReader {
  public:
    explicit ReversingReader(std::unique_ptr<BlockReader> inner) : inner_(std::move(inner)) {}

    void submit(const ReadRequest& request) override {
        Held* held = nullptr;
        {
            const std::lock_guard lock(mutex_);
            held = &held_.emplace_back();
            held->reader = this;
            held->request = request;
            ++outstanding_;
        }
        ReadRequest redirected = request;
        redirected.completion = held;
        inner_->submit(redirected);
    }

  private:
    struct Held final : ReadCompletion {
        ReversingReader* reader = nullptr;
        ReadRequest request;
        ReadResult result;
        void read_done(int, const ReadResult& done) noexcept override {
            result = done;
            reader->one_done();
        }
    };

    void one_done() {
        std::deque<Held> told;
        {
            const std::lock_guard lock(mutex_);
            if (--outstanding_) return;
            told.swap(held_);
        }
        for (auto held = told.rbegin(); held != told.rend(); ++held)
            held->request.completion->read_done(held->request.range, held->result);
    }

    std::mutex mutex_;
    std::deque<Held> held_;
    size_t outstanding_ = 0;
    std::unique_ptr<BlockReader> inner_;  // last: its threads end first
};

constexpr std::pair<const char*, ReadFault::Kind> kNames[] = {
    {"short", ReadFault::Kind::short_read},        {"interrupted", ReadFault::Kind::interrupted},
    {"io_error", ReadFault::Kind::io_error},       {"invalid", ReadFault::Kind::invalid},
    {"end_of_file", ReadFault::Kind::end_of_file}, {"stale", ReadFault::Kind::stale},
    {"shifted", ReadFault::Kind::shifted},         {"delay", ReadFault::Kind::delay},
};

}  // namespace

ReadFault::Kind fault_kind(const std::string& name) {
    for (const auto& [known, kind] : kNames)
        if (name == known) return kind;
    throw Error("OptionError", "unknown fault", "faults", "a name in io/faults.cpp", name);
}

void FaultyReads::add(const ReadFault& fault) {
    const std::lock_guard lock(mutex_);
    faults_.push_back(fault);
}

void FaultyReads::clear() {
    const std::lock_guard lock(mutex_);
    faults_.clear();
}

bool FaultyReads::take(int file, uint64_t offset, uint64_t count, ReadFault* taken) {
    const std::lock_guard lock(mutex_);
    for (ReadFault& fault : faults_) {
        if (fault.times < 1 || fault.file != file || fault.offset < offset || fault.offset >= offset + count) continue;
        --fault.times;
        *taken = fault;
        return true;
    }
    return false;
}

ssize_t FaultyReads::pread(int file, int fd, void* into, size_t count, off_t offset) {
    ReadFault fault;
    if (!take(file, static_cast<uint64_t>(offset), count, &fault)) return ::pread(fd, into, count, offset);
    const auto fail = [](int error) -> ssize_t {
        errno = error;
        return -1;
    };
    switch (fault.kind) {
        case ReadFault::Kind::interrupted:
            return fail(EINTR);
        case ReadFault::Kind::io_error:
            return fail(EIO);
        case ReadFault::Kind::invalid:
            return fail(EINVAL);
        case ReadFault::Kind::end_of_file:
            return 0;
        case ReadFault::Kind::stale:
            return static_cast<ssize_t>(count);
        case ReadFault::Kind::shifted:
            return ::pread(fd, into, count, offset + static_cast<off_t>(fault.bytes));
        case ReadFault::Kind::delay:
            std::this_thread::sleep_for(std::chrono::microseconds(std::min(fault.bytes, ReadFault::kLongestDelay)));
            return ::pread(fd, into, count, offset);
        case ReadFault::Kind::short_read:
            break;
    }
    // A direct read of part of a block is refused, so the whole is read, part of it owned up to, and the rest spoilt.
    const ssize_t got = ::pread(fd, into, count, offset);
    const ssize_t told = std::min(got, static_cast<ssize_t>(fault.bytes));
    if (told < got) std::memset(static_cast<uint8_t*>(into) + told, 0xA5, static_cast<size_t>(got - told));
    return told;
}

std::unique_ptr<BlockReader> FaultyReads::wrap(std::unique_ptr<BlockReader> reader) {
    if (!reverse_) return reader;
    return std::make_unique<ReversingReader>(std::move(reader));
}

}  // namespace colibri
