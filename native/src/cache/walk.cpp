// A walk over experts of one layer: reads that run ahead of the caller, and the order in which experts are handed out.
#include <chrono>
#include <cstring>
#include <string>

#include "colibri/repack.h"
#include "store_core.h"

namespace colibri {
namespace {

using State = WalkItem::State;

Error read_error(const StoreCore& core, const StoredExpert& expert, const ReadRange& range, const ReadResult& result) {
    const uint64_t at = range.offset + result.arrived;
    const Extent& extent = extent_at(expert, range.file, at);
    std::string got;
    switch (result.outcome) {
        case ReadResult::Outcome::end_of_file:
            got = "end of file";
            break;
        case ReadResult::Outcome::stalled:
            got = "the same part of a block again and again";
            break;
        default:
            got = std::strerror(result.error);
    }
    return Error("ReadError", "read of an expert failed",
                 core.files.path(range.file) + ", " + extent.tensor + ", offset " + std::to_string(at),
                 std::to_string(range.needed) + " bytes from offset " + std::to_string(range.offset),
                 got + " after " + std::to_string(result.arrived) + " bytes");
}

void repack_expert(const StoredExpert& expert, const ReadPlan& plan, const uint8_t* from, const Slot& slot) {
    const StoredMatrix* matrices[] = {&expert.gate, &expert.up, &expert.down};
    for (size_t i = 0; i < 3; ++i) {
        const StoredMatrix& m = *matrices[i];
        uint8_t* out = slot.memory + slot.parts[i];
        if (m.rows16)
            std::memcpy(out, from + plan.at[2 * i], m.weights.nbytes);
        else
            repack_rows16(m, from + plan.at[2 * i], from + plan.at[2 * i + 1], out);
    }
}

}  // namespace

void WalkItem::read_done(int range, const ReadResult& result) noexcept {
    StoreCore& store = *core;
    {
        const std::lock_guard lock(store.mutex);
        store.counters.bytes_read += result.transferred;
        store.counters.retries += result.retries;
        if (result.outcome != ReadResult::Outcome::ok && !error)
            error.emplace(read_error(store, *stored, plan.ranges[static_cast<size_t>(range)], result));
        if (--ranges_left) return;
    }
    // The last range is here: until the state changes below, memory and plan belong to this thread.
    if (!error && staging) repack_expert(*stored, plan, staging, *slot);

    const std::lock_guard lock(store.mutex);
    if (staging) store.free_staging.push_back(std::exchange(staging, nullptr));
    --(walk ? walk->loading : store.announced_loading);
    state = error ? State::failed : State::ready;
    if (error) {
        store.free_slot(std::exchange(slot, nullptr));
        --(announced ? store.announced_slots : walk->ahead);
    } else if (walk) {
        store.counters.useful_bytes += file_bytes(*stored);
        if (announced) store.counters.prefetch_useful_bytes += file_bytes(*stored);
    }
    store.start_reads();
    store.changed.notify_all();
    if (!walk) store.forget(*this);  // may be the end of this item
}

void StoreCore::begin_read(WalkItem& item, int layer) {
    const bool in_place = used_in_place(*item.stored);
    item.plan = plan_reads(*item.stored);
    item.slot = free_slots.back();
    free_slots.pop_back();
    item.slot->layer = layer;
    item.slot->expert = item.expert;
    if (in_place) {
        item.slot->parts = {item.plan.at[0], item.plan.at[2], item.plan.at[4]};
    } else {
        item.staging = free_staging.back();
        free_staging.pop_back();
        item.slot->parts = repacked_offsets(*item.stored);
    }
    item.state = State::loading;
    item.ranges_left = item.plan.ranges.size();
    uint8_t* into = in_place ? item.slot->memory : item.staging;
    for (size_t i = 0; i < item.plan.ranges.size(); ++i) {
        const ReadRange& r = item.plan.ranges[i];
        reader->submit({r.file, r.offset, r.length, r.needed, into + r.at, &item, static_cast<int>(i)});
    }
}

void StoreCore::start_reads() {
    if (!live || start_walk(*live)) start_announced();
}

// Reads start in the order of the walk, and no more of them than there are spare slots: what runs ahead is bounded by that
// also while the cache is still empty. True where nothing is left to start.
bool StoreCore::start_walk(WalkState& walk) {
    const size_t end = options.pipe ? walk.items.size() : walk.asked;
    for (; walk.looked_at < end; ++walk.looked_at) {
        WalkItem& item = *walk.items[walk.looked_at];
        if (item.state != State::pending) continue;
        // Slots for announced experts are never lent: whether they are in use is a matter of timing.
        const auto announced_free = static_cast<size_t>(geometry.prefetch_slots - announced_slots);
        if (walk.ahead == geometry.spare_slots || free_slots.size() <= announced_free) return false;
        if (!used_in_place(*item.stored) && free_staging.empty()) return false;
        ++walk.ahead;
        ++walk.loading;
        begin_read(item, walk.layer);
    }
    return walk.looked_at == walk.items.size();
}

ExpertStore::Walk ExpertStore::walk(int layer, std::span<const int32_t> experts) {
    StoreCore& core = impl_->core;
    auto impl = std::make_unique<Walk::Impl>();
    WalkState& state = impl->state;
    state.core = &core;
    state.layer = layer;
    state.items.reserve(experts.size());
    if (experts.empty()) core.check_expert(layer, 0);
    for (const int32_t expert : experts) state.items.push_back(core.item(layer, expert));

    const std::lock_guard lock(core.mutex);
    if (core.live) throw Error("EngineError", "two walks at once", "layer " + std::to_string(layer), "one", "a second");
    std::vector<bool> seen(static_cast<size_t>(core.layers[static_cast<size_t>(layer)].experts()));
    for (const int32_t expert : experts) {
        if (seen[static_cast<size_t>(expert)])
            throw Error("EngineError", "a walk names an expert twice", "layer " + std::to_string(layer), "each expert once",
                        std::to_string(expert));
        seen[static_cast<size_t>(expert)] = true;
    }
    LayerCache& cache = core.layers[static_cast<size_t>(layer)];
    cache.begin_walk();
    for (std::unique_ptr<WalkItem>& item : state.items) {
        item->walk = &state;
        if (Slot* const slot = cache.find(item->expert)) {
            item->state = State::hit;
            item->slot = slot;
            ++slot->leases;
        } else if (std::unique_ptr<WalkItem> taken = core.take_announced(state, item->expert)) {
            item = std::move(taken);
        }
    }
    core.count_foreseen(layer, experts);
    core.forsake();
    core.live = &state;
    core.start_reads();
    return Walk(std::move(impl));
}

ExpertStore::Walk::Walk(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ExpertStore::Walk::Walk(Walk&&) noexcept = default;

ExpertStore::Walk::~Walk() {
    if (!impl_) return;
    WalkState& walk = impl_->state;
    StoreCore& core = *walk.core;
    std::unique_lock lock(core.mutex);
    core.live = nullptr;  // nothing new starts
    core.changed.wait(lock, [&] { return walk.loading == 0; });
    for (const std::unique_ptr<WalkItem>& item : walk.items) {
        if (item->state == State::hit) --item->slot->leases;
        if (item->state != State::ready) continue;
        // Whether a read had completed by now is a matter of timing, so what was not handed out is not cached either.
        core.free_slot(item->slot);
        core.announced_slots -= item->announced;
    }
}

ExpertLease ExpertStore::Walk::next() {
    WalkState& walk = impl_->state;
    StoreCore& core = *walk.core;
    auto lease = std::make_unique<ExpertLease::Impl>();
    std::unique_lock lock(core.mutex);
    if (walk.handed == walk.items.size())
        throw Error("EngineError", "the walk is over", "layer " + std::to_string(walk.layer),
                    std::to_string(walk.items.size()) + " experts", "one more");
    WalkItem& item = *walk.items[walk.handed];
    walk.asked = walk.handed + 1;
    core.start_reads();
    // Reads start in order, so an expert that waits for a slot now has none to wait for but those that the caller holds.
    if (item.state == State::pending)
        throw Error("EngineError", "every slot is leased",
                    "layer " + std::to_string(walk.layer) + ", expert " + std::to_string(item.expert), "a lease released before",
                    "none");
    if (item.state == State::loading) {
        const auto begin = std::chrono::steady_clock::now();
        core.changed.wait(lock, [&] { return item.state != State::loading; });
        core.counters.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    ++walk.handed;
    if (item.state == State::failed) throw *item.error;
    LayerCache& cache = core.layers[static_cast<size_t>(walk.layer)];
    cache.use(item.slot);
    if (item.state == State::hit) {
        ++core.counters.hits;
        core.counters.pinned_hits += cache.pinned(item.expert);
    } else {
        ++core.counters.misses;
        --(item.announced ? core.announced_slots : walk.ahead);
        ++item.slot->leases;
        core.cache(item.slot);
    }
    item.state = State::done;
    *lease = {&core, item.slot};
    core.start_reads();
    return ExpertLease(std::move(lease));
}

}  // namespace colibri
