// Slots, and the experts of one layer that are in memory, by recency of use. No locks: the store's mutex guards all of it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace colibri {

// One buffer that can hold one expert.
struct Slot {
    uint8_t* memory = nullptr;
    int layer = -1;
    int expert = -1;
    std::array<uint64_t, 3> parts{};  // where gate, up and down begin
    int leases = 0;                   // handed out, or promised to the walk that lives
    bool cached = false;              // in its layer's cache
};

class LayerCache {
  public:
    // `pinned` experts take none of the capacity and are never given up.
    LayerCache(int64_t capacity, size_t experts, const std::vector<int32_t>& pinned)
        : capacity_(static_cast<size_t>(capacity)), by_expert_(experts, nullptr), pinned_(experts) {
        by_recency_.reserve(capacity_);
        for (const int32_t expert : pinned) pinned_[static_cast<size_t>(expert)] = true;
    }

    Slot* find(int expert) const { return by_expert_[static_cast<size_t>(expert)]; }
    bool pinned(int expert) const { return pinned_[static_cast<size_t>(expert)]; }
    int experts() const { return static_cast<int>(by_expert_.size()); }
    const std::vector<Slot*>& by_recency() const { return by_recency_; }

    // Makes a cached slot the most recently used one.
    void touch(Slot* slot) {
        if (pinned(slot->expert)) return;
        const auto at = std::find(by_recency_.begin(), by_recency_.end(), slot);
        std::rotate(at, at + 1, by_recency_.end());
    }

    struct Insertion {
        bool done = false;
        Slot* evicted = nullptr;  // to be freed by the caller
    };

    // Caches a slot as the most recently used one. A full cache gives up its least recently used slot without a lease;
    // where every slot is leased, or the expert is cached already, nothing changes.
    Insertion insert(Slot* slot) {
        if (find(slot->expert)) return {};
        Insertion result{true, nullptr};
        const bool counts = !pinned(slot->expert);
        if (counts && by_recency_.size() == capacity_) {
            const auto victim = std::find_if(by_recency_.begin(), by_recency_.end(), [](const Slot* s) { return s->leases == 0; });
            if (victim == by_recency_.end()) return {};
            result.evicted = *victim;
            result.evicted->cached = false;
            by_expert_[static_cast<size_t>(result.evicted->expert)] = nullptr;
            by_recency_.erase(victim);
        }
        if (counts) by_recency_.push_back(slot);
        by_expert_[static_cast<size_t>(slot->expert)] = slot;
        slot->cached = true;
        return result;
    }

  private:
    size_t capacity_;
    std::vector<Slot*> by_recency_;  // least recently used first; without pinned experts
    std::vector<Slot*> by_expert_;   // null where absent
    std::vector<bool> pinned_;
};

}  // namespace colibri
