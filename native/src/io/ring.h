// The kernel's submission and completion rings (io_uring), by system calls alone.
#pragma once

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>

namespace colibri {

// For one thread at a time. Counts of requests are bounded by the caller: at most `entries` that have no completion yet.
class Ring {
  public:
    // Throws Error("OptionError") where the kernel refuses; the rings are tried, not only asked for.
    explicit Ring(unsigned entries);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // An empty entry, to be filled in before the next call of enter().
    io_uring_sqe& add(uint8_t operation, uint64_t user_data);
    // Hands over what was added, and sleeps until there are `completions`, or until the kernel has a reason not to.
    void enter(unsigned completions);
    // Calls told(user_data, result) for each completion that there is.
    template <typename Told>
    void reap(Told told) {
        uint32_t head = *completed_head_;
        // The kernel writes the tail after the entries below it.
        for (const uint32_t tail = acquire(completed_tail_); head != tail; ++head) {
            const io_uring_cqe completion = completions_[head & completed_mask_];
            told(completion.user_data, completion.res);
        }
        release(completed_head_, head);
    }

  private:
    static uint32_t acquire(const uint32_t* shared) { return __atomic_load_n(shared, __ATOMIC_ACQUIRE); }
    static void release(uint32_t* shared, uint32_t value) { __atomic_store_n(shared, value, __ATOMIC_RELEASE); }
    void map(const io_uring_params& params);
    void try_out();
    void close_all();

    int fd_ = -1;
    uint8_t* rings_ = nullptr;  // both; the kernel's and ours to write
    size_t rings_bytes_ = 0;
    io_uring_sqe* entries_ = nullptr;
    size_t entries_bytes_ = 0;
    uint32_t added_mask_ = 0, added_ = 0, not_entered_ = 0;
    uint32_t* added_tail_ = nullptr;
    uint32_t* completed_head_ = nullptr;
    uint32_t* completed_tail_ = nullptr;
    uint32_t completed_mask_ = 0;
    io_uring_cqe* completions_ = nullptr;
};

}  // namespace colibri
