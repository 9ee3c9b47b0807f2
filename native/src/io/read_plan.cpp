// Grouping the parts of an expert into reads.
#include "read_plan.h"

#include <algorithm>
#include <tuple>

#include "reader.h"

namespace colibri {
namespace {

uint64_t end_of(const Extent& e) { return e.offset + e.nbytes; }

// The parts of one expert that are not empty, by file and offset.
std::vector<int> sorted_parts(const std::array<const Extent*, kExtents>& extents) {
    std::vector<int> parts;
    for (int i = 0; i < kExtents; ++i)
        if (extents[static_cast<size_t>(i)]->nbytes) parts.push_back(i);
    std::stable_sort(parts.begin(), parts.end(), [&](int a, int b) {
        const Extent &x = *extents[static_cast<size_t>(a)], &y = *extents[static_cast<size_t>(b)];
        return std::tie(x.file, x.offset) < std::tie(y.file, y.offset);
    });
    return parts;
}

}  // namespace

std::array<const Extent*, kExtents> extents_of(const StoredExpert& e) {
    return {&e.gate.weights, &e.gate.scales, &e.up.weights, &e.up.scales, &e.down.weights, &e.down.scales};
}

ReadPlan plan_reads(const StoredExpert& expert) {
    const auto extents = extents_of(expert);
    const std::vector<int> parts = sorted_parts(extents);
    const auto part = [&](size_t i) -> const Extent& { return *extents[static_cast<size_t>(parts[i])]; };

    ReadPlan plan;
    for (size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
        uint64_t useful = 0, last = 0;
        for (end = begin; end < parts.size() && part(end).file == part(begin).file; ++end) {
            useful += part(end).nbytes;
            last = std::max(last, end_of(part(end)));
        }
        const bool together = (last - part(begin).offset) * 4 <= useful * 5;
        for (size_t i = begin; i < end; ++i) {
            const uint64_t first = align_down(part(i).offset), stop = end_of(part(i));
            const bool joins = i > begin && (together || first <= plan.ranges.back().offset + plan.ranges.back().length);
            if (!joins) {
                if (!plan.ranges.empty()) plan.buffer_bytes += plan.ranges.back().length;
                plan.ranges.push_back({part(i).file, first, 0, 0, plan.buffer_bytes});
            }
            ReadRange& range = plan.ranges.back();
            range.needed = std::max(range.needed, stop - range.offset);
            range.length = align_up(range.needed);
            plan.at[static_cast<size_t>(parts[i])] = range.at + (part(i).offset - range.offset);
        }
    }
    if (!plan.ranges.empty()) plan.buffer_bytes += plan.ranges.back().length;
    return plan;
}

const Extent& extent_at(const StoredExpert& expert, int file, uint64_t offset) {
    const auto extents = extents_of(expert);
    const std::vector<int> parts = sorted_parts(extents);
    const Extent* found = extents[0];
    for (const int i : parts) {
        const Extent& e = *extents[static_cast<size_t>(i)];
        if (e.file != file) continue;
        found = &e;
        if (offset < end_of(e)) break;
    }
    return *found;
}

}  // namespace colibri
