// A BlockReader made of threads that call pread.
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "file_set.h"
#include "reader.h"

namespace colibri {
namespace {

constexpr int kStallLimit = 8;  // reads in a row that deliver something but less than one block

class PreadPool final : public BlockReader {
  public:
    PreadPool(const FileSet& files, int threads, ReadHooks& hooks) : files_(files), hooks_(hooks) {
        // Signals belong to the program's own threads: an interrupt must wake the one that waits, not a read.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            stop();
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~PreadPool() override { stop(); }

    void submit(const ReadRequest& request) override {
        {
            const std::lock_guard lock(mutex_);
            queue_.push_back(request);
        }
        wake_.notify_one();
    }

  private:
    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

    void run() {
        for (;;) {
            ReadRequest request;
            {
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
                if (queue_.empty()) return;
                request = queue_.front();
                queue_.pop_front();
            }
            request.completion->read_done(request.range, read(request));
        }
    }

    ReadResult read(const ReadRequest& request) {
        ReadResult result;
        int stalled = 0;
        for (uint64_t calls = 0; result.arrived < request.needed; ++calls) {
            result.retries = calls;
            // A direct read must start at a block: after a short one that did not end at a block, the rest is read again.
            const uint64_t at = files_.direct() ? align_down(result.arrived) : result.arrived;
            const ssize_t got = hooks_.pread(request.file, files_.fd(request.file), request.into + at, request.length - at,
                                             static_cast<off_t>(request.offset + at));
            if (got < 0) {
                if (errno == EINTR) continue;
                result.outcome = ReadResult::Outcome::failed;
                result.error = errno;
                return result;
            }
            const uint64_t reached = at + static_cast<uint64_t>(got);
            result.transferred += static_cast<uint64_t>(got);
            if (got == 0) {
                result.outcome = ReadResult::Outcome::end_of_file;
                return result;
            }
            stalled = reached > result.arrived ? 0 : stalled + 1;
            if (stalled && ended(request, reached)) {
                result.outcome = ReadResult::Outcome::end_of_file;
                return result;
            }
            if (stalled == kStallLimit) {
                result.outcome = ReadResult::Outcome::stalled;
                return result;
            }
            result.arrived = std::max(result.arrived, reached);
        }
        return result;
    }

    // A file that was cut inside a block delivers the same short read again and again.
    bool ended(const ReadRequest& request, uint64_t reached) const {
        struct stat status{};
        return ::fstat(files_.fd(request.file), &status) == 0 && static_cast<uint64_t>(status.st_size) <= request.offset + reached;
    }

    const FileSet& files_;
    ReadHooks& hooks_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<ReadRequest> queue_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

ssize_t ReadHooks::pread(int, int fd, void* into, size_t count, off_t offset) { return ::pread(fd, into, count, offset); }

std::unique_ptr<BlockReader> make_pread_pool(const FileSet& files, int threads, ReadHooks& hooks) {
    return std::make_unique<PreadPool>(files, threads, hooks);
}

}  // namespace colibri
