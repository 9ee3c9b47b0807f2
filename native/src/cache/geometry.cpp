// Slots, staging buffers and their sizes.
#include "geometry.h"

#include <algorithm>
#include <string>

#include "../io/read_plan.h"
#include "../io/reader.h"
#include "colibri/error.h"
#include "colibri/repack.h"

namespace colibri {
namespace {

constexpr uint64_t kLine = 64;
constexpr int64_t kSparesPastThreads = 2;  // one in use by the caller, one ready when that is done

void check_extent(const Extent& extent, int64_t expected, const StoreOptions& options) {
    if (extent.nbytes != static_cast<uint64_t>(expected))
        throw Error("ShapeError", "bytes of an expert tensor", extent.tensor, std::to_string(expected),
                    std::to_string(extent.nbytes));
    if (expected && (extent.file < 0 || extent.file >= static_cast<int>(options.files.size())))
        throw Error("OptionError", "file index of an expert tensor", extent.tensor,
                    "0 … " + std::to_string(static_cast<int>(options.files.size()) - 1), std::to_string(extent.file));
}

bool same_form(const StoredMatrix& a, const StoredMatrix& b) {
    return a.rows == b.rows && a.cols == b.cols && a.bits == b.bits && a.group_size == b.group_size && a.rows16 == b.rows16 &&
           a.scale_bytes == b.scale_bytes;
}

void check_expert(const StoredExpert& expert, const StoredExpert& first, const StoreOptions& options) {
    for (const auto member : {&StoredExpert::gate, &StoredExpert::up, &StoredExpert::down}) {
        const StoredMatrix& m = expert.*member;
        check_extent(m.weights, stored_weight_bytes(m), options);
        check_extent(m.scales, stored_scale_bytes(m), options);
        if (!same_form(m, first.*member))
            throw Error("ShapeError", "experts of one layer have one shape and format", m.weights.tensor, "as the first expert",
                        "another");
    }
}

void check_domain(const char* option, int64_t value, int64_t largest, int64_t least = 1) {
    if (value < least || value > largest)
        throw Error("OptionError", "option outside its domain", option, std::to_string(least) + " … " + std::to_string(largest),
                    std::to_string(value));
}

void check_pinned(const StoreOptions& options) {
    const auto reject = [](const std::string& what, const std::string& expected, const std::string& got) {
        throw Error("OptionError", what, "pinned", expected, got);
    };
    if (!options.pinned.empty() && options.pinned.size() != options.experts.size())
        reject("one list per layer", std::to_string(options.experts.size()), std::to_string(options.pinned.size()));
    for (size_t layer = 0; layer < options.pinned.size(); ++layer) {
        std::vector<bool> seen(options.experts[layer].size());
        for (const int32_t expert : options.pinned[layer]) {
            if (expert < 0 || static_cast<size_t>(expert) >= seen.size())
                reject("an expert that the layer does not have", "0 … " + std::to_string(seen.size() - 1), std::to_string(expert));
            if (seen[static_cast<size_t>(expert)]) reject("an expert named twice", "each once", std::to_string(expert));
            seen[static_cast<size_t>(expert)] = true;
        }
    }
}

}  // namespace

bool used_in_place(const StoredExpert& e) { return e.gate.rows16 && e.up.rows16 && e.down.rows16; }

uint64_t file_bytes(const StoredExpert& e) {
    uint64_t sum = 0;
    for (const Extent* extent : extents_of(e)) sum += extent->nbytes;
    return sum;
}

std::array<uint64_t, 3> repacked_offsets(const StoredExpert& e) {
    const auto lines = [](const StoredMatrix& m) { return (static_cast<uint64_t>(rows16_bytes(m)) + kLine - 1) / kLine * kLine; };
    return {0, lines(e.gate), lines(e.gate) + lines(e.up)};
}

Geometry geometry_of(const StoreOptions& options) {
    check_domain("cache_experts", options.cache_experts, int64_t{1} << 20);
    check_domain("io_threads", options.io_threads, 256);
    check_domain("prefetch_experts", options.prefetch_experts, int64_t{1} << 20, 0);
    if (options.experts.empty()) throw Error("OptionError", "a store needs experts", "experts", "at least one layer", "none");

    check_pinned(options);

    Geometry g;
    g.spare_slots = options.io_threads + kSparesPastThreads;
    g.prefetch_slots = options.prefetch_experts;
    g.slots = g.spare_slots + g.prefetch_slots;
    for (const auto& layer : options.experts) {
        if (layer.empty()) throw Error("OptionError", "a layer needs experts", "experts", "at least one", "none");
        const size_t at = g.slots_per_layer.size();
        const auto pinned = static_cast<int64_t>(options.pinned.empty() ? 0 : options.pinned[at].size());
        g.slots_per_layer.push_back(std::min(options.cache_experts, static_cast<int64_t>(layer.size()) - pinned));
        g.slots += g.slots_per_layer.back() + pinned;
        // Any slot may serve any layer.
        for (const StoredExpert& expert : layer) {
            check_expert(expert, layer[0], options);
            const uint64_t read = plan_reads(expert).buffer_bytes;
            if (used_in_place(expert)) {
                g.slot_bytes = std::max(g.slot_bytes, read);
                continue;
            }
            g.staging_bytes = std::max(g.staging_bytes, read);
            g.slot_bytes =
                std::max(g.slot_bytes, align_up(repacked_offsets(expert)[2] + static_cast<uint64_t>(rows16_bytes(expert.down))));
        }
    }
    // Announced reads that nobody will take may still hold theirs when a walk begins.
    if (g.staging_bytes) g.staging_buffers = options.io_threads * (g.prefetch_slots ? 2 : 1);
    return g;
}

}  // namespace colibri
