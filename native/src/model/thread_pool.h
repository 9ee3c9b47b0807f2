// Compute threads that sleep when idle. The split of work changes no result: every item is computed alone.
#pragma once

#include <atomic>
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

    // Calls body(begin, end, thread) over parts of [0, items) until all are done; thread < threads(), and any of them may be
    // called several times or not at all. Runs inline where the work (in bytes or operations, whichever the caller estimates)
    // is too small to be worth waking anybody. Rethrows the first exception.
    void parallel_for(int64_t items, int64_t work, const std::function<void(int64_t, int64_t, int)>& body);

  private:
    void stop();
    void run(int thread);
    void work(int thread);
    bool claim(int64_t* begin, int64_t* end);

    std::vector<std::thread> workers_;
    std::mutex mutex_;  // guards all but the atomics, which are also read without it
    std::condition_variable wake_, done_;
    const std::function<void(int64_t, int64_t, int)>* body_ = nullptr;
    int64_t items_ = 0, least_ = 1;
    std::atomic<int64_t> next_{0};         // the first item that nobody has claimed
    std::atomic<uint64_t> generation_{0};  // of jobs
    std::atomic<int> running_{0};          // workers that take part in the job
    bool open_ = false;                    // workers may still join
    int sleeping_ = 0;
    bool stop_ = false;
    std::exception_ptr failure_;
};

}  // namespace colibri
