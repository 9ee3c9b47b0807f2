// Asynchronous reads of blocks of files: requests go in, completions come back on a thread of the reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "colibri/expert_store.h"

namespace colibri {

class FileSet;

// What O_DIRECT asks of offsets, lengths and addresses; also the unit in which bytes are counted.
constexpr uint64_t kBlock = 4096;
constexpr uint64_t align_down(uint64_t x) { return x / kBlock * kBlock; }
constexpr uint64_t align_up(uint64_t x) { return align_down(x + kBlock - 1); }

struct ReadResult {
    enum class Outcome { ok, end_of_file, failed, stalled };
    Outcome outcome = Outcome::ok;
    int error = 0;             // errno where `failed`
    uint64_t arrived = 0;      // bytes of the request that are in memory, from its start
    uint64_t transferred = 0;  // bytes that the operating system delivered, those read twice included
    uint64_t retries = 0;      // system calls after the first
};

// Told once per request, on a thread of the reader that holds no lock. The request's memory belongs to the reader until then.
struct ReadCompletion {
    virtual void read_done(int range, const ReadResult& result) noexcept = 0;

  protected:
    ~ReadCompletion() = default;
};

struct ReadRequest {
    int file = 0;
    uint64_t offset = 0;  // multiple of kBlock
    uint64_t length = 0;  // multiple of kBlock; may pass the end of the file
    uint64_t needed = 0;  // bytes that must arrive
    uint8_t* into = nullptr;
    ReadCompletion* completion = nullptr;
    int range = 0;  // handed back to the completion
};

// submit() does not wait for the disk, never completes a request before it returns, and may be called from completions.
// Requests start in the order of submission. The destructor completes what was submitted and joins every thread.
class BlockReader {
  public:
    virtual ~BlockReader() = default;
    virtual void submit(const ReadRequest& request) = 0;
    virtual const char* name() const = 0;
};

// One call of the operating system that reads. Its outcome is the bytes that it delivered, or -errno.
struct ReadCall {
    int file = 0;
    int fd = -1;
    uint8_t* into = nullptr;
    uint64_t count = 0;
    uint64_t offset = 0;
};

// What a test does to one call; by default nothing.
struct Tampering {
    std::optional<int64_t> instead;  // the outcome, without a call
    uint64_t delay = 0;              // microseconds before the call
    uint64_t further = 0;            // bytes by which the call reads further on
    uint64_t most = UINT64_MAX;      // bytes that are owned up to; the others are spoilt
};

// The seam for tests: every call that reads, whoever makes it, and the reader as a whole.
struct ReadHooks {
    virtual ~ReadHooks() = default;
    virtual Tampering tamper(const ReadCall&) { return {}; }
    virtual std::unique_ptr<BlockReader> wrap(std::unique_ptr<BlockReader> reader) { return reader; }
};

// Both read at most `depth` requests at a time. `files` and `hooks` outlive them.
// `depth` threads, each with one pread in flight.
std::unique_ptr<BlockReader> make_pread_pool(const FileSet& files, int depth, ReadHooks& hooks);
// One thread and the kernel's rings. Throws Error("OptionError") where the kernel refuses them.
std::unique_ptr<BlockReader> make_uring_reader(const FileSet& files, int depth, ReadHooks& hooks);
// The reader of that kind, wrapped by the hooks.
std::unique_ptr<BlockReader> make_reader(ReaderKind kind, const FileSet& files, int depth, ReadHooks& hooks);

// Why the kernel refuses io_uring; empty where it does not.
std::string uring_refusal();

}  // namespace colibri
