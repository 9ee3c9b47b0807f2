// Compute threads that sleep when idle. The split of work changes no result: every item is computed alone.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace colibri {

class ThreadPool {
  public:
    // Throws Error("OptionError") where the system refuses that many.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(begin, end, thread) over a split of [0, items); thread < threads(). Runs inline where the work (in bytes
    // or operations, whichever the caller estimates) is too small to be worth waking anybody. Rethrows the first exception.
    void parallel_for(int64_t items, int64_t work, const std::function<void(int64_t, int64_t, int)>& body);

  private:
    void stop();
    void run(int thread);
    void run_share(int thread);

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(int64_t, int64_t, int)>* body_ = nullptr;
    int64_t items_ = 0;
    uint64_t generation_ = 0;
    int pending_ = 0;
    bool stop_ = false;
    std::exception_ptr failure_;
};

}  // namespace colibri
