// The selection of a step whose positions are each routed as a step of their own.
#include "rows_alone.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "colibri/error.h"

namespace colibri::routing {
namespace {

std::vector<int32_t> marked_ids(const std::vector<bool>& marked) {
    std::vector<int32_t> ids;
    for (size_t e = 0; e < marked.size(); ++e)
        if (marked[e]) ids.push_back(static_cast<int32_t>(e));
    return ids;
}

}  // namespace

Selection select_rows_alone(std::span<const float> logits, int64_t positions, int64_t experts, const RouterSpec& router,
                            const RoutingOptions& options) {
    if (looks_at_cache(options.policy))
        throw Error("OptionError", "the policy looks at the cache, which later steps would find otherwise", "rows alone",
                    "a policy that is a function of logits and options",
                    options.policy == Policy::resident ? "resident" : "cache_route");
    RoutingOptions single = options;
    single.rows_alone = false;
    Selection all;
    all.positions = positions;
    all.top_k = router.top_k;
    std::vector<bool> kept(experts, false), chosen(experts, false);
    double mass = 0;
    for (int64_t row = 0; row < positions; ++row) {
        const Selection one = select_experts(logits.subspan(static_cast<size_t>(row * experts), static_cast<size_t>(experts)), 1,
                                             experts, router, single);
        all.ids.insert(all.ids.end(), one.ids.begin(), one.ids.end());
        all.weights.insert(all.weights.end(), one.weights.begin(), one.weights.end());
        for (const int32_t id : one.kept) kept[id] = chosen[id] = true;
        for (const int32_t id : one.removed) chosen[id] = true;
        all.dropped_slots += one.dropped_slots;
        all.emptied_positions += one.emptied_positions;
        mass += one.mass_kept;
    }
    all.kept = marked_ids(kept);
    const std::vector<int32_t> members = marked_ids(chosen);
    std::set_difference(members.begin(), members.end(), all.kept.begin(), all.kept.end(), std::back_inserter(all.removed));
    all.union_size = static_cast<int64_t>(members.size());
    all.dropped = static_cast<int64_t>(all.removed.size());
    all.mass_kept = mass / static_cast<double>(positions);
    return all;
}

}  // namespace colibri::routing
