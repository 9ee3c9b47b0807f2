// Slots, and the experts of one layer that are in memory, by rank. No locks: the store's mutex guards all of it.
//
// What goes first where a full cache takes in an expert follows from the order of the layer's walks, hand-outs
// and releases alone, in integers:
//
// * A step is a walk of the layer, of whatever length: also one that names no expert, hands out none or ends early. A use is
//   a hand-out, one for however many positions; an expert that a walk names and does not hand out is not used in it.
// * Every expert has a running mean of its use, whether it is in memory or not. It begins at 0; where a walk begins, the
//   layer's means all lose 1/32, rounded down; a use adds 2^30 / 32.
// * step_lfu: experts used in the layer's newest walk rank above all others; among either, the larger mean does. lru: all rank
//   alike. Of equal ranks the one goes first that was handed out, or entered, longest ago.
// * What is leased does not go, and an expert that ranks below all that could go does not enter.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "colibri/expert_store.h"

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
    LayerCache(CachePolicy policy, int64_t capacity, size_t experts, const std::vector<int32_t>& pinned)
        : policy_(policy),
          capacity_(static_cast<size_t>(capacity)),
          by_expert_(experts, nullptr),
          pinned_(experts),
          uses_(experts) {
        by_recency_.reserve(capacity_);
        for (const int32_t expert : pinned) pinned_[static_cast<size_t>(expert)] = true;
    }

    Slot* find(int expert) const { return by_expert_[static_cast<size_t>(expert)]; }
    bool pinned(int expert) const { return pinned_[static_cast<size_t>(expert)]; }
    int experts() const { return static_cast<int>(by_expert_.size()); }

    // Residents that are not pinned, in the order in which they would go.
    std::vector<Slot*> by_rank() const {
        std::vector<Slot*> slots = by_recency_;
        std::stable_sort(slots.begin(), slots.end(), [this](const Slot* a, const Slot* b) { return rank(a) < rank(b); });
        return slots;
    }

    void begin_walk() {
        ++walk_;
        for (Uses& uses : uses_) uses.mean -= uses.mean >> kShift;
    }

    // A slot's expert is handed out, at most once in a walk.
    void use(Slot* slot) {
        Uses& uses = uses_[static_cast<size_t>(slot->expert)];
        uses.mean += kUnit >> kShift;
        uses.walk = walk_;
        if (!slot->cached || pinned(slot->expert)) return;
        const auto at = std::find(by_recency_.begin(), by_recency_.end(), slot);
        std::rotate(at, at + 1, by_recency_.end());
    }

    struct Insertion {
        bool done = false;
        Slot* evicted = nullptr;  // to be freed by the caller
    };

    // Caches a slot as the most recent one. A full cache gives up the slot that goes first of those without a lease; where
    // there is none, or it ranks above the new one, or the expert is cached already, nothing changes.
    Insertion insert(Slot* slot) {
        if (find(slot->expert)) return {};
        Insertion result{true, nullptr};
        const bool counts = !pinned(slot->expert);
        if (counts && by_recency_.size() == capacity_) {
            const auto victim = first_to_go();
            if (victim == by_recency_.end() || rank(*victim) > rank(slot)) return {};
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
    static constexpr int kShift = 5;  // a use counts half after 22 steps
    static constexpr uint32_t kUnit = uint32_t{1} << 30;

    struct Uses {
        uint32_t mean = 0;  // at most kUnit + 31
        uint64_t walk = 0;  // the last one with a use; 0: none
    };

    uint64_t rank(const Slot* slot) const {
        if (policy_ == CachePolicy::lru) return 0;
        const Uses& uses = uses_[static_cast<size_t>(slot->expert)];
        return uint64_t{uses.walk == walk_} << 32 | uses.mean;
    }

    std::vector<Slot*>::iterator first_to_go() {
        auto first = by_recency_.end();
        for (auto at = by_recency_.begin(); at != by_recency_.end(); ++at)
            if (!(*at)->leases && (first == by_recency_.end() || rank(*at) < rank(*first))) first = at;
        return first;
    }

    CachePolicy policy_;
    size_t capacity_;
    std::vector<Slot*> by_recency_;  // handed out or entered longest ago first; without pinned experts
    std::vector<Slot*> by_expert_;   // null where absent
    std::vector<bool> pinned_;
    std::vector<Uses> uses_;  // by expert
    uint64_t walk_ = 0;       // walks of the layer so far
};

}  // namespace colibri
