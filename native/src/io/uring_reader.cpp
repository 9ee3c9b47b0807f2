// A BlockReader made of one thread and the kernel's rings. The thread alone touches the rings; others leave requests in a queue
// and wake it where it sleeps, so that nobody else pays for handing a read to the kernel.
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "colibri/error.h"
#include "file_set.h"
#include "read_progress.h"
#include "ring.h"
#include "signals_blocked.h"

namespace colibri {
namespace {

class Event {
  public:
    Event() : fd_(::eventfd(0, EFD_CLOEXEC)) {
        if (fd_ < 0) throw Error("OptionError", "io_uring cannot be used", "reader", "an eventfd, or pread", std::strerror(errno));
    }
    ~Event() { ::close(fd_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    int fd() const { return fd_; }
    void signal() const {
        const uint64_t one = 1;
        while (::write(fd_, &one, sizeof one) < 0 && errno == EINTR) continue;
    }

  private:
    int fd_;
};

class UringReader final : public BlockReader {
  public:
    UringReader(const FileSet& files, int depth, ReadHooks& hooks)
        : files_(files), hooks_(hooks), ring_(static_cast<unsigned>(depth) + 1), reads_(static_cast<size_t>(depth)) {
        for (Read& read : reads_) free_.push_back(&read);
        finished_.reserve(reads_.size());
        const SignalsBlocked blocked;
        thread_ = std::thread([this]() noexcept { run(); });
    }

    ~UringReader() override {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        event_.signal();
        thread_.join();
    }

    const char* name() const override { return "io_uring"; }

    void submit(const ReadRequest& request) override {
        bool wake = false;
        {
            const std::lock_guard lock(mutex_);
            queue_.push_back(request);
            wake = std::exchange(sleeps_, false);
        }
        if (wake) event_.signal();
    }

  private:
    // A request that was taken from the queue, and the one call of it that the kernel has.
    struct Read {
        ReadProgress progress;
        ReadCall call;
        Tampering tampering;
        __kernel_timespec delay{};
        bool delayed = false;
    };
    static constexpr uint64_t kWoken = UINT64_MAX;  // not an index of reads_

    void run() {
        await_event();
        while (take_requests()) {
            // Reads are started before completions are told: those may take long.
            ring_.enter(finished_.empty() ? 1 : 0);
            for (const ReadProgress& progress : finished_) progress.complete();
            finished_.clear();
            ring_.reap([this](uint64_t what, int32_t result) {
                if (what == kWoken) return woken();
                returned(reads_[what], result);
            });
        }
    }

    // False at the end: stopped, and nothing is left to be read or told.
    bool take_requests() {
        const std::lock_guard lock(mutex_);
        for (; !queue_.empty() && !free_.empty(); queue_.pop_front()) {
            Read& read = *free_.back();
            free_.pop_back();
            read.progress = ReadProgress(files_, queue_.front());
            go_on(read);
        }
        // Where every read is under way, a new request changes nothing.
        sleeps_ = finished_.empty() && !free_.empty();
        const bool idle = free_.size() == reads_.size() && finished_.empty() && !awaits_event_;
        return !(stopping_ && idle);
    }

    // The next call of a read, or its end.
    void go_on(Read& read) {
        while (!read.progress.done()) {
            read.call = read.progress.next();
            read.tampering = hooks_.tamper(read.call);
            if (!read.tampering.instead) return read.tampering.delay ? add_delay(read) : add_read(read);
            read.progress.take(*read.tampering.instead);
        }
        finished_.push_back(read.progress);
        free_.push_back(&read);
    }

    void add_read(Read& read) {
        io_uring_sqe& entry = ring_.add(IORING_OP_READ, index(read));
        entry.fd = read.call.fd;
        entry.addr = reinterpret_cast<uint64_t>(read.call.into);
        entry.len = static_cast<uint32_t>(read.call.count);
        entry.off = read.call.offset + read.tampering.further;
        // From the page cache the kernel would copy before it returns; its own threads do that beside each other.
        if (!files_.direct()) entry.flags = IOSQE_ASYNC;
    }

    void add_delay(Read& read) {
        read.delayed = true;
        read.delay.tv_nsec = static_cast<long long>(read.tampering.delay * 1000);
        io_uring_sqe& entry = ring_.add(IORING_OP_TIMEOUT, index(read));
        entry.fd = -1;
        entry.addr = reinterpret_cast<uint64_t>(&read.delay);
        entry.len = 1;
    }

    void returned(Read& read, int32_t result) {
        if (std::exchange(read.delayed, false)) return add_read(read);
        read.progress.take(owned_up(read.call, read.tampering, result));
        go_on(read);
    }

    void await_event() {
        io_uring_sqe& entry = ring_.add(IORING_OP_READ, kWoken);
        entry.fd = event_.fd();
        entry.addr = reinterpret_cast<uint64_t>(&event_count_);
        entry.len = sizeof event_count_;
        awaits_event_ = true;
    }

    void woken() {
        awaits_event_ = false;
        const std::lock_guard lock(mutex_);
        if (!stopping_) await_event();
    }

    uint64_t index(const Read& read) const { return static_cast<uint64_t>(&read - reads_.data()); }

    const FileSet& files_;
    ReadHooks& hooks_;

    std::mutex mutex_;  // guards the next three
    std::deque<ReadRequest> queue_;
    bool sleeps_ = false;  // the thread waits for a request among other things
    bool stopping_ = false;

    // The thread's own.
    Event event_;
    uint64_t event_count_ = 0;
    bool awaits_event_ = false;
    Ring ring_;
    std::vector<Read> reads_;
    std::vector<Read*> free_;
    std::vector<ReadProgress> finished_;
    std::thread thread_;
};

}  // namespace

std::unique_ptr<BlockReader> make_uring_reader(const FileSet& files, int depth, ReadHooks& hooks) {
    return std::make_unique<UringReader>(files, depth, hooks);
}

std::string uring_refusal() {
    try {
        const Event event;
        const Ring ring(1);
        return {};
    } catch (const Error& error) {
        return error.got;
    }
}

}  // namespace colibri
