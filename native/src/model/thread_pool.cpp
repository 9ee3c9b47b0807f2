// Compute threads that sleep when idle, but not at once: the next job often comes within microseconds.
#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>
#include <utility>

#include "colibri/error.h"

namespace colibri {

namespace {

// Waking a thread costs about 10 microseconds; a core streams this much in that time.
constexpr int64_t kWorthWaking = 128 * 1024;
// The smallest part of a job: long beside the claim of it, short beside the wait for the thread that took the last one.
constexpr int64_t kLeastPart = 64 * 1024;
// How long a thread looks for what it waits for before it sleeps. Between two products of a step lie less than these.
constexpr std::chrono::microseconds kPatience{200};

template <typename Condition>
void look_for(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!condition() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

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
        ++generation_;
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
    bool wake = false;
    {
        const std::lock_guard lock(mutex_);
        body_ = &body;
        items_ = items;
        least_ = std::max<int64_t>(1, kLeastPart / std::max<int64_t>(1, work / items));
        next_ = 0;
        failure_ = nullptr;
        open_ = true;
        wake = sleeping_ > 0;
        ++generation_;
    }
    if (wake) wake_.notify_all();
    this->work(0);
    {
        // Whoever has not come yet would find nothing to do.
        const std::lock_guard lock(mutex_);
        open_ = false;
    }
    look_for([this] { return running_ == 0; });
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    body_ = nullptr;
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::run(int thread) {
    uint64_t seen = 0;
    for (;;) {
        look_for([&] { return generation_ != seen; });
        {
            std::unique_lock lock(mutex_);
            ++sleeping_;
            wake_.wait(lock, [&] { return generation_ != seen; });
            --sleeping_;
            if (stop_) return;
            seen = generation_;
            if (!open_) continue;
            ++running_;
        }
        work(thread);
        const std::lock_guard lock(mutex_);
        if (--running_ == 0) done_.notify_one();
    }
}

// Large parts first, then ever smaller ones, so that all threads end at about the same time however fast each of them runs.
bool ThreadPool::claim(int64_t* begin, int64_t* end) {
    int64_t at = next_;
    do {
        if (at >= items_) return false;
        *begin = at;
        *end = at + std::min(items_ - at, std::max(least_, (items_ - at) / (2 * threads())));
    } while (!next_.compare_exchange_weak(at, *end));
    return true;
}

void ThreadPool::work(int thread) {
    int64_t begin = 0, end = 0;
    while (claim(&begin, &end)) {
        try {
            (*body_)(begin, end, thread);
        } catch (...) {
            const std::lock_guard lock(mutex_);
            if (!failure_) failure_ = std::current_exception();
        }
    }
}

}  // namespace colibri
