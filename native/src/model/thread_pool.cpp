// Compute threads that sleep when idle.
#include "thread_pool.h"

#include <string>
#include <system_error>
#include <utility>

#include "colibri/error.h"

namespace colibri {

namespace {
// Waking a thread costs about 10 microseconds; a core streams this much in that time.
constexpr int64_t kWorthWaking = 128 * 1024;
}  // namespace

ThreadPool::ThreadPool(int threads) {
    try {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { run(i); });
    } catch (const std::system_error& refused) {
        const size_t got = workers_.size();
        stop();
        throw Error("OptionError", "the system refuses so many threads", "threads", "at most " + std::to_string(got + 1),
                    std::to_string(threads) + " (" + refused.what() + ")");
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(int64_t items, int64_t work, const std::function<void(int64_t, int64_t, int)>& body) {
    if (items <= 0) return;
    if (workers_.empty() || items == 1 || work < kWorthWaking) {
        body(0, items, 0);
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        body_ = &body;
        items_ = items;
        pending_ = static_cast<int>(workers_.size());
        failure_ = nullptr;
        ++generation_;
    }
    wake_.notify_all();
    run_share(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return pending_ == 0; });
    body_ = nullptr;
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::run(int thread) {
    uint64_t seen = 0;
    for (;;) {
        {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
            if (stop_) return;
            seen = generation_;
        }
        run_share(thread);
        {
            const std::lock_guard lock(mutex_);
            --pending_;
        }
        done_.notify_one();
    }
}

void ThreadPool::run_share(int thread) {
    const int64_t begin = items_ * thread / threads(), end = items_ * (thread + 1) / threads();
    if (begin == end) return;
    try {
        (*body_)(begin, end, thread);
    } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::current_exception();
    }
}

}  // namespace colibri
