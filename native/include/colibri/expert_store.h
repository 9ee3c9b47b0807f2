// The experts on disk and those in memory: reads, the cache of each layer, leases.
//
// What a step computes never depends on this class: it hands out the same bytes whether they were cached or read.
// One thread calls walk(), next() and releases leases; reads run on the store's own threads. Which experts stay in memory
// follows from the order of those calls alone, never from when a read completes. Walks and leases end before their store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace colibri {

// A run of bytes of one tensor in one file.
struct Extent {
    int file = 0;  // index into StoreOptions::files
    uint64_t offset = 0;
    uint64_t nbytes = 0;
    std::string tensor;  // name for error messages
};

// One matrix of an expert as it lies on disk. A slot always holds rows16 bytes; other layouts are repacked when read.
struct StoredMatrix {
    int64_t rows = 0;
    int64_t cols = 0;
    int bits = 4;
    int64_t group_size = 64;  // 0: one scale per row
    bool rows16 = true;
    int scale_bytes = 4;  // of one scale; 2 (float16) only with int4 in rows16
    Extent weights;
    Extent scales;  // nbytes 0 where the layout holds its scales inside
};

struct StoredExpert {
    StoredMatrix gate, up, down;
};

struct ReadHooks;  // io/reader.h; tests put faults in with it

// What reads: threads that call pread, or one thread and the kernel's rings (io_uring), which a kernel may refuse.
enum class ReaderKind { automatic, pread, uring };

// Which expert goes first where a full cache takes in another; cache/layer_cache.h has the rules.
enum class CachePolicy { step_lfu, lru };

struct StoreOptions {
    std::vector<std::string> files;
    std::vector<std::vector<StoredExpert>> experts;  // [MoE layer][expert]; all of a layer have one shape
    std::vector<std::vector<int32_t>> pinned;        // [MoE layer], or empty: kept from their first use on, in slots of their own
    int64_t cache_experts = 1;                       // slots per layer for the others; more than there are counts as all
    CachePolicy cache_policy = CachePolicy::step_lfu;
    int io_threads = 2;            // reads in flight
    bool pipe = true;              // reads run ahead of the caller; false: each begins when its expert is asked for
    int64_t prefetch_experts = 0;  // slots for announced experts, whatever their layer; 0: nothing is read before its walk
    bool direct = true;            // O_DIRECT where the file system allows it
    ReaderKind reader = ReaderKind::automatic;
    std::shared_ptr<ReadHooks> hooks;  // null outside tests
};

struct StoreCounters {
    uint64_t bytes_read = 0;    // completed reads, alignment included
    uint64_t useful_bytes = 0;  // bytes of the experts that those reads were for
    uint64_t hits = 0;          // experts handed out that were in memory when their walk began
    uint64_t pinned_hits = 0;   // those hits that were on pinned experts
    uint64_t misses = 0;        // experts handed out that were read for their walk
    uint64_t retries = 0;       // system calls that continued an interrupted or short read
    double wait_seconds = 0;    // time that next() was blocked
    // Of walks of layers that had been announced:
    uint64_t foreseen = 0;               // experts of theirs that the announcement named
    uint64_t foreseeable = 0;            // all experts of theirs
    uint64_t prefetch_useful_bytes = 0;  // bytes of experts that were read, or begun, before their walk
    uint64_t prefetch_wasted_bytes = 0;  // bytes of experts that were read and that no walk asked for
};

// One expert in memory, valid while the lease lives. Its slot cannot be evicted or reused before that.
class ExpertLease {
  public:
    struct Impl;
    explicit ExpertLease(std::unique_ptr<Impl> impl);
    ExpertLease(ExpertLease&&) noexcept;
    ExpertLease& operator=(ExpertLease&&) noexcept;
    ~ExpertLease();
    int expert() const;
    // rows16 bytes, at any alignment: what lies as rows16 on disk is used where the read put it. int4 with per-row scales
    // appears as groups of 64, int8 as int8 (see quant.py).
    const uint8_t* gate() const;
    const uint8_t* up() const;
    const uint8_t* down() const;

  private:
    std::unique_ptr<Impl> impl_;
};

class ExpertStore {
  public:
    explicit ExpertStore(StoreOptions options);
    ~ExpertStore();
    ExpertStore(const ExpertStore&) = delete;
    ExpertStore& operator=(const ExpertStore&) = delete;

    // The experts of one layer in one step, handed out in the given order, each once. Residents among them are protected
    // from eviction at once; reads of the others start at once, as far as there are buffers, and go on behind the caller.
    // One walk lives at a time. Destroying it early waits for its reads and caches nothing that was not handed out.
    class Walk {
      public:
        struct Impl;
        explicit Walk(std::unique_ptr<Impl> impl);
        Walk(Walk&&) noexcept;
        ~Walk();
        // Blocks until the next expert is in memory. Throws Error("ReadError") with file, tensor and offset; the walk may
        // go on with the expert after that. A caller that holds so many leases that no buffer is left gets an EngineError.
        ExpertLease next();

      private:
        std::unique_ptr<Impl> impl_;
    };
    Walk walk(int layer, std::span<const int32_t> experts);

    // What the next walk of `layer` will probably ask for, likeliest first. Those that are not in memory are read behind the
    // walk that lives, into slots of their own; nothing of this enters a cache before a walk hands it out. The next walk takes
    // what it needs of them, and the rest is forgotten; so it is by the next announcement. A read that fails is made again by
    // the walk.
    void announce(int layer, std::span<const int32_t> experts);

    // These four from any thread.
    bool resident(int layer, int expert) const;
    std::vector<int> by_rank(int layer) const;  // residents that are not pinned, in the order in which they would go
    int64_t free_slots() const;                 // neither cached, nor leased, nor being read into
    StoreCounters counters() const;
    double wait_seconds() const;
    std::string reader() const;                      // "direct" or "buffered (<reason>)", and by what: "direct, io_uring"
    int64_t slot_bytes() const;                      // memory of one slot
    int64_t expert_file_bytes(int layer = 0) const;  // bytes of one expert on disk, without alignment
    // Memory that a store of these options takes: slots of all layers, staging buffers.
    static int64_t memory_bytes(const StoreOptions& options);

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace colibri
