// State shared by the store, its walk and its leases. Everything below `mutex` is guarded by it.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../io/file_set.h"
#include "../io/read_plan.h"
#include "../io/reader.h"
#include "arena.h"
#include "colibri/error.h"
#include "colibri/expert_store.h"
#include "geometry.h"
#include "layer_cache.h"

namespace colibri {

struct StoreCore;
struct WalkState;

// One expert of a walk or of an announcement, and the read that brings it.
struct WalkItem final : ReadCompletion {
    enum class State { hit, pending, loading, ready, failed, done };

    StoreCore* core = nullptr;
    WalkState* walk = nullptr;  // null while no walk has asked for it
    bool announced = false;     // holds one of the slots for announced experts
    const StoredExpert* stored = nullptr;
    int expert = -1;
    State state = State::pending;
    Slot* slot = nullptr;
    uint8_t* staging = nullptr;
    ReadPlan plan;
    size_t ranges_left = 0;
    std::optional<Error> error;

    void read_done(int range, const ReadResult& result) noexcept override;
};

struct WalkState {
    StoreCore* core = nullptr;
    int layer = -1;
    std::vector<std::unique_ptr<WalkItem>> items;  // reads point at them
    size_t handed = 0;                             // items before this one are done
    size_t asked = 0;                              // items before this one were asked for
    size_t looked_at = 0;                          // items before this one are in memory, being read, or done
    int64_t ahead = 0;                             // misses that hold one of the spare slots and are not done
    int64_t loading = 0;
};

// What a walk to come will probably ask for.
struct Announcement {
    int layer = -1;
    std::vector<int32_t> experts;
    std::vector<std::unique_ptr<WalkItem>> items;  // those that were not in memory
    size_t looked_at = 0;
};

struct StoreCore {
    explicit StoreCore(StoreOptions options);
    ~StoreCore();

    StoreOptions options;
    Geometry geometry;
    std::shared_ptr<ReadHooks> hooks;
    FileSet files;
    Arena arena;

    mutable std::mutex mutex;
    std::condition_variable changed;
    std::vector<Slot> slots;
    std::vector<Slot*> free_slots;
    std::vector<uint8_t*> free_staging;
    std::vector<LayerCache> layers;
    StoreCounters counters;
    WalkState* live = nullptr;
    Announcement announced;
    std::vector<std::unique_ptr<WalkItem>> forsaken;  // announced, being read, and not asked for by the walk that could have
    int64_t announced_slots = 0;                      // that hold or await an announced expert
    int64_t announced_loading = 0;                    // of those, being read for no walk

    std::unique_ptr<BlockReader> reader;  // last: its threads end before anything they touch

    void check_expert(int layer, int expert) const;         // throws Error("EngineError")
    std::unique_ptr<WalkItem> item(int layer, int expert);  // likewise
    // The caller holds the mutex.
    void start_reads();
    bool start_walk(WalkState& walk);
    void start_announced();
    void begin_read(WalkItem& item, int layer);
    std::unique_ptr<WalkItem> take_announced(WalkState& walk, int expert);
    void count_foreseen(int layer, std::span<const int32_t> experts);
    void forsake();
    void forget_bytes(WalkItem& item);
    void forget(WalkItem& item);
    void free_slot(Slot* slot);
    bool cache(Slot* slot);
    // Takes the mutex.
    void release(Slot* slot);
};

struct ExpertLease::Impl {
    StoreCore* core;
    Slot* slot;
};

struct ExpertStore::Walk::Impl {
    WalkState state;
};

struct ExpertStore::Impl {
    explicit Impl(StoreOptions options) : core(std::move(options)) {}
    StoreCore core;
};

}  // namespace colibri
