// Setting up the rings, and entering the kernel.
#include "ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "colibri/error.h"

namespace colibri {
namespace {

[[noreturn]] void refuse(const std::string& got) {
    throw Error("OptionError", "io_uring cannot be used", "reader", "a kernel and a sandbox that permit io_uring, or pread", got);
}

[[noreturn]] void refuse(const char* call, int error) { refuse(std::string(call) + ": " + std::strerror(error)); }

}  // namespace

Ring::Ring(unsigned entries) {
    io_uring_params params{};
    fd_ = static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params));
    if (fd_ < 0) refuse("io_uring_setup", errno);
    try {
        // Reads, an eventfd that is waited for without a thread, completions that are never dropped: all there since 5.7.
        if (!(params.features & IORING_FEAT_FAST_POLL)) refuse("a kernel older than 5.7");
        map(params);
        try_out();
    } catch (...) {
        close_all();
        throw;
    }
}

Ring::~Ring() { close_all(); }

void Ring::close_all() {
    if (entries_) ::munmap(entries_, entries_bytes_);
    if (rings_) ::munmap(rings_, rings_bytes_);
    ::close(fd_);
}

void Ring::map(const io_uring_params& params) {
    const auto mapped = [&](size_t bytes, off_t what) {
        void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what);
        if (memory == MAP_FAILED) refuse("mmap", errno);
        return static_cast<uint8_t*>(memory);
    };
    // Since 5.4 one mapping holds both rings.
    const size_t added_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    const size_t completed_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_bytes_ = added_bytes > completed_bytes ? added_bytes : completed_bytes;
    rings_ = mapped(rings_bytes_, IORING_OFF_SQ_RING);
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    entries_ = reinterpret_cast<io_uring_sqe*>(mapped(entries_bytes_, IORING_OFF_SQES));

    const auto at = [&](uint32_t offset) { return reinterpret_cast<uint32_t*>(rings_ + offset); };
    added_tail_ = at(params.sq_off.tail);
    added_mask_ = *at(params.sq_off.ring_mask);
    completed_head_ = at(params.cq_off.head);
    completed_tail_ = at(params.cq_off.tail);
    completed_mask_ = *at(params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
    // The ring holds numbers of entries; ours are taken in turn, so each stands for itself.
    for (uint32_t i = 0; i < params.sq_entries; ++i) at(params.sq_off.array)[i] = i;
}

// A sandbox may permit one system call and refuse the other.
void Ring::try_out() {
    add(IORING_OP_NOP, 0);
    release(added_tail_, added_);
    int outcome = -EIO;
    while (::syscall(__NR_io_uring_enter, fd_, 1u, 1u, IORING_ENTER_GETEVENTS, nullptr, size_t{0}) < 0)
        if (errno != EINTR) refuse("io_uring_enter", errno);
    not_entered_ = 0;
    reap([&](uint64_t, int result) { outcome = result; });
    if (outcome < 0) refuse("io_uring", -outcome);
}

io_uring_sqe& Ring::add(uint8_t operation, uint64_t user_data) {
    io_uring_sqe& entry = entries_[added_ & added_mask_];
    entry = {};
    entry.opcode = operation;
    entry.user_data = user_data;
    ++added_;
    ++not_entered_;
    return entry;
}

void Ring::enter(unsigned completions) {
    if (!not_entered_ && !completions) return;
    release(added_tail_, added_);
    const long taken = ::syscall(__NR_io_uring_enter, fd_, not_entered_, completions, completions ? IORING_ENTER_GETEVENTS : 0u,
                                 nullptr, size_t{0});
    if (taken >= 0) {
        not_entered_ -= static_cast<uint32_t>(taken);
    } else if (errno == EAGAIN || errno == EBUSY) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the kernel is short of memory; the caller comes again
    } else if (errno != EINTR) {
        // Reads that the kernel holds would still write to memory: nothing can be undone, and nothing is known any more.
        throw Error("ReadError", "io_uring broke down", std::string("io_uring_enter: ") + std::strerror(errno));
    }
}

}  // namespace colibri
