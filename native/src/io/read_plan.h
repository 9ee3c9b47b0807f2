// Which ranges of which files bring one expert, and where its parts then lie in the buffer.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "colibri/expert_store.h"

namespace colibri {

constexpr int kExtents = 6;  // gate, gate scales, up, up scales, down, down scales

struct ReadRange {
    int file = 0;
    uint64_t offset = 0;  // multiple of kBlock
    uint64_t length = 0;  // multiple of kBlock
    uint64_t needed = 0;  // up to the last byte of the last part
    uint64_t at = 0;      // in the buffer, multiple of kBlock
};

struct ReadPlan {
    std::vector<ReadRange> ranges;
    std::array<uint64_t, kExtents> at{};  // of each part in the buffer; meaningless where the part is empty
    uint64_t buffer_bytes = 0;            // multiple of kBlock
};

std::array<const Extent*, kExtents> extents_of(const StoredExpert& expert);

// Parts in one file come with one read where that reads at most a quarter more than the parts themselves; otherwise each run
// of parts that share or touch blocks is a range. No block is read twice.
ReadPlan plan_reads(const StoredExpert& expert);

// The part that byte `offset` of `file` belongs to, or the next part after it: what a failed read was for.
const Extent& extent_at(const StoredExpert& expert, int file, uint64_t offset);

}  // namespace colibri
