// Routing and budget: which experts a step uses, from its router logits and the options alone.
//
// A pure function. Nothing here knows the cache, the disk, threads or instruction sets; policies `resident` and `cache_route` alone
// are told what the cache holds. Defined by reference/routing.py.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace colibri {

enum class Score { sigmoid, softmax };
enum class Policy { aggregate, floor, substitute, coverage, per_position, resident, cache_route };
enum class Denominator { survivors, frozen };
enum class Vote { weights, all_scores };

struct RouterSpec {
    Score score = Score::sigmoid;
    int top_k = 1;
    std::vector<float> bias;  // empty: none
    int n_group = 1;
    int topk_group = 1;
    bool norm_topk_prob = true;
    double routed_scaling_factor = 1.0;
};

struct RoutingOptions {
    int expert_topk = 0;
    double expert_topp = 0.0;
    int64_t budget = 0;
    Policy policy = Policy::aggregate;
    Denominator denominator = Denominator::survivors;
    Vote vote = Vote::weights;
    int floor = 1;
    double coverage = 1.0;
    int route_top = 2;        // of `cache_route`: picks that stay,
    int route_within = 12;    // and places of the ranking that cached experts are preferred in; 0 is off
    bool rows_alone = false;  // every position is routed as a step of its own, whatever the policy, unless it looks at the cache
};

// Whether the policy has to be told what the cache holds.
inline bool looks_at_cache(Policy policy) { return policy == Policy::resident || policy == Policy::cache_route; }

inline constexpr int64_t kFullVote = int64_t{1} << 16;
// A row adds at most 2^42 · kFullVote to an expert's votes, so that int64 holds the sum of 31.
inline constexpr int64_t kMostVotingRows = 31;

// Fields as in colibri_jax.Selection.
struct Selection {
    int64_t positions = 0;
    int top_k = 0;
    std::vector<int32_t> ids;      // [positions][top_k], -1 where empty
    std::vector<float> weights;    // [positions][top_k], 0 where empty
    std::vector<int32_t> kept;     // ascending
    std::vector<int32_t> removed;  // ascending: in the union, not kept (for the estimate of avoided reads)
    int64_t union_size = 0;
    int64_t dropped = 0;
    int64_t dropped_slots = 0;
    int64_t emptied_positions = 0;
    double mass_kept = 1.0;
};

// logits: float32 [positions][experts]. Throws Error("NonFiniteLogitError") naming position and expert. The caller has
// validated router and options (the Python dataclasses do); the logits are checked here, and that the row votes fit them.
// `resident`: ids in [0, experts) that the cache holds, in any order, for policies that look at the cache. `row_votes`
// [positions]: what each position's votes are multiplied by where they are summed over positions, 0 to kFullVote; empty: all alike.
// Not with `rows_alone`. `coverage` sums over experts too: that this stays exact has been seen to (routing_spec.most_voting_rows).
// With `rows_alone`: ids and weights of each position are those of a step of that position alone; union_size, kept, removed and
// dropped are of all positions together (an expert is removed when no position kept it); dropped_slots and emptied_positions are
// sums over positions, mass_kept is the mean, summed in their order.
Selection select_experts(std::span<const float> logits, int64_t positions, int64_t experts, const RouterSpec& router,
                         const RoutingOptions& options, std::span<const int32_t> resident = {},
                         std::span<const int64_t> row_votes = {});

}  // namespace colibri
