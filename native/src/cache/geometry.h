// Sizes of everything a store allocates, from its options alone; and the check of those options.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "colibri/expert_store.h"

namespace colibri {

struct Geometry {
    std::vector<int64_t> slots_per_layer;  // pinned experts' own aside
    int64_t spare_slots = 0;               // experts being read, or read and not yet in a layer's cache
    int64_t prefetch_slots = 0;            // announced experts that no walk has handed out yet
    int64_t slots = 0;                     // all of them
    uint64_t slot_bytes = 0;               // multiple of 4096
    int64_t staging_buffers = 0;           // row-major bytes on their way into a slot; 0 where every matrix is rows16
    uint64_t staging_bytes = 0;            // of one such buffer, multiple of 4096

    uint64_t total_bytes() const {
        return static_cast<uint64_t>(slots) * slot_bytes + static_cast<uint64_t>(staging_buffers) * staging_bytes;
    }
};

// Throws Error("OptionError"), Error("ShapeError"), Error("UnknownFormatError").
Geometry geometry_of(const StoreOptions& options);

// Where gate, up and down begin in a slot whose expert is repacked.
std::array<uint64_t, 3> repacked_offsets(const StoredExpert& expert);

// True where the read itself goes to the slot.
bool used_in_place(const StoredExpert& expert);

// Bytes of an expert on disk, without alignment.
uint64_t file_bytes(const StoredExpert& expert);

}  // namespace colibri
