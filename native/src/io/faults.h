// Reads that go wrong on purpose, for tests: what the operating system may do and what a broken store would do.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "reader.h"

namespace colibri {

// Acts on the first `times` system calls that would read byte `offset` of file `file`.
struct ReadFault {
    // short: delivers at most `bytes`. interrupted: EINTR. again: EAGAIN. io_error: EIO. invalid: EINVAL. end_of_file: 0 bytes.
    // stale: claims success and leaves memory as it was. shifted: delivers the bytes that lie `bytes` further on.
    // delay: a good read that begins `bytes` microseconds later (kLongestDelay at most), so that others overtake it.
    enum class Kind { short_read, interrupted, again, io_error, invalid, end_of_file, stale, shifted, delay };
    static constexpr uint64_t kLongestDelay = 2000;
    Kind kind = Kind::io_error;
    int file = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    int times = 1;
};

class FaultyReads final : public ReadHooks {
  public:
    // `reverse`: completions are held back until every submitted request has one, then told last first.
    FaultyReads(std::vector<ReadFault> faults, bool reverse) : faults_(std::move(faults)), reverse_(reverse) {}
    // Any thread, also while reads run.
    void add(const ReadFault& fault);
    void clear();
    Tampering tamper(const ReadCall& call) override;
    std::unique_ptr<BlockReader> wrap(std::unique_ptr<BlockReader> reader) override;

  private:
    bool take(const ReadCall& call, ReadFault* taken);

    std::mutex mutex_;
    std::vector<ReadFault> faults_;
    bool reverse_;
};

// Throws Error("OptionError") for an unknown name.
ReadFault::Kind fault_kind(const std::string& name);

}  // namespace colibri
