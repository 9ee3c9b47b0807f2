// A BlockReader made of threads that call pread.
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "read_progress.h"
#include "signals_blocked.h"

namespace colibri {
namespace {

class PreadPool final : public BlockReader {
  public:
    PreadPool(const FileSet& files, int depth, ReadHooks& hooks) : files_(files), hooks_(hooks) {
        const SignalsBlocked blocked;
        try {
            for (int i = 0; i < depth; ++i) threads_.emplace_back([this] { run(); });
        } catch (...) {
            stop();
            throw;
        }
    }

    ~PreadPool() override { stop(); }

    const char* name() const override { return "pread pool"; }

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
            ReadProgress progress;
            {
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
                if (queue_.empty()) return;
                progress = ReadProgress(files_, queue_.front());
                queue_.pop_front();
            }
            while (!progress.done()) progress.take(read_now(progress.next(), hooks_));
            progress.complete();
        }
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

std::unique_ptr<BlockReader> make_pread_pool(const FileSet& files, int depth, ReadHooks& hooks) {
    return std::make_unique<PreadPool>(files, depth, hooks);
}

}  // namespace colibri
