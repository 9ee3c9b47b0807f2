// Announced experts: read before a walk asks for them, taken by it or forgotten.
#include <algorithm>

#include "store_core.h"

namespace colibri {

using State = WalkItem::State;

StoreCore::~StoreCore() {
    const std::lock_guard lock(mutex);
    forsake();  // or completions would start reads of a reader that ends
}

std::unique_ptr<WalkItem> StoreCore::item(int layer, int expert) {
    check_expert(layer, expert);
    auto made = std::make_unique<WalkItem>();
    made->core = this;
    made->expert = expert;
    made->stored = &options.experts[static_cast<size_t>(layer)][static_cast<size_t>(expert)];
    return made;
}

void ExpertStore::announce(int layer, std::span<const int32_t> experts) {
    StoreCore& core = impl_->core;
    Announcement announcement;
    announcement.layer = layer;
    announcement.experts.assign(experts.begin(), experts.end());
    core.check_expert(layer, 0);
    for (const int32_t expert : experts) {
        announcement.items.push_back(core.item(layer, expert));
        announcement.items.back()->announced = true;
    }
    const std::lock_guard lock(core.mutex);
    std::erase_if(announcement.items, [&](const std::unique_ptr<WalkItem>& item) {
        return core.layers[static_cast<size_t>(layer)].find(item->expert) != nullptr;
    });
    core.forsake();
    core.announced = std::move(announcement);
    core.start_reads();
}

// No more at once than the reader reads: what waits in its queue could not be taken back where the next walk needs others.
void StoreCore::start_announced() {
    for (; announced.looked_at < announced.items.size(); ++announced.looked_at) {
        WalkItem& next = *announced.items[announced.looked_at];
        if (announced_loading == options.io_threads || announced_slots == geometry.prefetch_slots || free_slots.empty()) return;
        if (!used_in_place(*next.stored) && free_staging.empty()) return;
        ++announced_slots;
        ++announced_loading;
        begin_read(next, announced.layer);
    }
}

// What was read or begun for an expert of a new walk; null where that is nothing.
std::unique_ptr<WalkItem> StoreCore::take_announced(WalkState& walk, int expert) {
    if (announced.layer != walk.layer) return nullptr;
    const auto at = std::find_if(announced.items.begin(), announced.items.end(), [&](const std::unique_ptr<WalkItem>& item) {
        return item && item->expert == expert && (item->state == State::loading || item->state == State::ready);
    });
    if (at == announced.items.end()) return nullptr;
    std::unique_ptr<WalkItem> taken = std::move(*at);
    taken->walk = &walk;
    if (taken->state == State::loading) {
        --announced_loading;
        ++walk.loading;
    } else {
        counters.useful_bytes += file_bytes(*taken->stored);
        counters.prefetch_useful_bytes += file_bytes(*taken->stored);
    }
    return taken;
}

void StoreCore::count_foreseen(int layer, std::span<const int32_t> experts) {
    if (announced.layer != layer) return;
    counters.foreseeable += experts.size();
    for (const int32_t expert : experts)
        counters.foreseen += static_cast<uint64_t>(std::count(announced.experts.begin(), announced.experts.end(), expert) > 0);
}

// Forgets the announcement; what is being read for it is forgotten when it has arrived.
void StoreCore::forsake() {
    for (std::unique_ptr<WalkItem>& item : announced.items) {
        if (!item) continue;
        if (item->state == State::loading)
            forsaken.push_back(std::move(item));
        else
            forget_bytes(*item);
    }
    announced = {};
}

void StoreCore::forget_bytes(WalkItem& item) {
    if (item.state != State::ready) return;
    counters.prefetch_wasted_bytes += file_bytes(*item.stored);
    free_slot(item.slot);
    --announced_slots;
}

// Ends an item that nobody took, after its read; one that is still announced stays.
void StoreCore::forget(WalkItem& item) {
    const auto at = std::find_if(forsaken.begin(), forsaken.end(), [&](const auto& each) { return each.get() == &item; });
    if (at == forsaken.end()) return;
    forget_bytes(item);
    forsaken.erase(at);
    start_reads();
}

}  // namespace colibri
