// Faulty system calls and completions in reverse order.
#include "faults.h"

#include <algorithm>
#include <cerrno>
#include <deque>
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

    const char* name() const override { return inner_->name(); }

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
    {"short", ReadFault::Kind::short_read},
    {"interrupted", ReadFault::Kind::interrupted},
    {"io_error", ReadFault::Kind::io_error},
    {"invalid", ReadFault::Kind::invalid},
    {"end_of_file", ReadFault::Kind::end_of_file},
    {"stale", ReadFault::Kind::stale},
    {"shifted", ReadFault::Kind::shifted},
    {"delay", ReadFault::Kind::delay},
    {"again", ReadFault::Kind::again},
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

bool FaultyReads::take(const ReadCall& call, ReadFault* taken) {
    const std::lock_guard lock(mutex_);
    for (ReadFault& fault : faults_) {
        if (fault.times < 1 || fault.file != call.file) continue;
        if (fault.offset < call.offset || fault.offset >= call.offset + call.count) continue;
        --fault.times;
        *taken = fault;
        return true;
    }
    return false;
}

Tampering FaultyReads::tamper(const ReadCall& call) {
    ReadFault fault;
    Tampering tampering;
    if (!take(call, &fault)) return tampering;
    switch (fault.kind) {
        case ReadFault::Kind::interrupted:
            tampering.instead = -EINTR;
            break;
        case ReadFault::Kind::again:
            tampering.instead = -EAGAIN;
            break;
        case ReadFault::Kind::io_error:
            tampering.instead = -EIO;
            break;
        case ReadFault::Kind::invalid:
            tampering.instead = -EINVAL;
            break;
        case ReadFault::Kind::end_of_file:
            tampering.instead = 0;
            break;
        case ReadFault::Kind::stale:
            tampering.instead = static_cast<int64_t>(call.count);
            break;
        case ReadFault::Kind::shifted:
            tampering.further = fault.bytes;
            break;
        case ReadFault::Kind::delay:
            tampering.delay = std::min(fault.bytes, ReadFault::kLongestDelay);
            break;
        case ReadFault::Kind::short_read:
            tampering.most = fault.bytes;
            break;
    }
    return tampering;
}

std::unique_ptr<BlockReader> FaultyReads::wrap(std::unique_ptr<BlockReader> reader) {
    if (!reverse_) return reader;
    return std::make_unique<ReversingReader>(std::move(reader));
}

}  // namespace colibri
