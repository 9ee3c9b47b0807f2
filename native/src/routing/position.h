// One position's routing before any budget: scores, groups, top K, TOPK, TOPP, and its gate weights.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "colibri/routing.h"

namespace colibri::routing {

// Routes positions one after another; holds the scratch, so that a step allocates once. Not thread-safe.
class PositionRouter {
  public:
    // `router` and `options` must outlive this object.
    PositionRouter(const RouterSpec& router, const RoutingOptions& options, int64_t experts);

    // Chooses experts for one position's finite logits [experts]. Writes the chosen ids and their scores in router order (choice
    // descending) to the front of `ids` and `picked` (both [top_k]) and returns how many they are, at least 1.
    int route(std::span<const float> logits, std::span<int32_t> ids, std::span<float> picked);

    // Chooses again for one position, by choice and from what `allowed` [experts] and the position's groups both allow: at most
    // `count`, neither TOPK nor TOPP. Writes and returns like `route`.
    int pick_among(std::span<const float> logits, const std::vector<bool>& allowed, int count, std::span<int32_t> ids,
                   std::span<float> picked);

    // Exchanges picks of one position, `ids` in router order with their scores in `picked`, for experts that are `cached`
    // [experts]: policy `cache_route`, reference/budget.py. Writes like `route` and returns how many were exchanged.
    int prefer_cached(std::span<const float> logits, const std::vector<bool>& cached, std::span<int32_t> ids,
                      std::span<float> picked);

    // Scores of all experts for the position seen last.
    std::span<const float> scores() const { return scores_; }

  private:
    void rank_candidates(std::span<const float> logits);
    void collect_candidates();
    void write(std::span<const uint64_t> keys, std::span<int32_t> ids, std::span<float> picked) const;
    int take_first(int count, std::span<int32_t> ids, std::span<float> picked);
    bool groups_limit() const { return router_.n_group > 1 && router_.topk_group < router_.n_group; }
    int apply_topp(int count, std::span<int32_t> ids, std::span<float> picked);

    const RouterSpec& router_;
    const RoutingOptions& options_;
    std::vector<float> scores_;         // [experts]
    std::vector<double> exponentials_;  // [experts], softmax only
    std::vector<float> choice_;         // [experts]
    std::vector<uint64_t> candidates_;  // rank keys of the eligible experts
    std::vector<uint64_t> groups_;      // rank keys of the groups
    std::vector<uint64_t> by_score_;    // rank keys of the chosen, for TOPP
    std::vector<uint64_t> picks_;       // rank keys of the chosen, by choice
};

// Float64 sum of scores, one by one in the given order.
double ordered_sum(std::span<const float> scores);

// weights[i] from scores[i]; where the router normalises, `sum` is what they are divided by.
void gate_weights(const RouterSpec& router, std::span<const float> scores, double sum, std::span<float> weights);

}  // namespace colibri::routing
