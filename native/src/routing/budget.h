// Which experts of a step's union a budget keeps.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "colibri/routing.h"

namespace colibri::routing {

// What the policies that cut the whole union judge by.
struct Ballot {
    std::span<const int32_t> members;  // the union, ascending
    std::span<const int64_t> votes;    // [experts]: each expert's aggregate, all in the same unit
    std::span<const int32_t> secured;  // members that stay whatever their votes, ascending: the floor set, or cache hits
};

// Whether the options ask for a cut of a union of this size. `per_position` may then still find nothing to cut.
bool budget_acts(const RoutingOptions& options, int64_t union_size);

// Whether the policy cuts or exchanges a position's experts without regard to the other positions, and so without votes.
bool acts_on_positions(Policy policy);

// Whether the policy has a floor set: every position's best experts.
bool has_floor(Policy policy);

// The experts to keep, ascending: the secured ones, then by votes, ties to the lowest id, up to `budget` members in all (0: no
// bound) and under `coverage` no further than its share of the votes.
std::vector<int32_t> keep_experts(const Ballot& ballot, const RoutingOptions& options);

// Marks a position's `count` experts of largest weight, ties to the lowest id, in `marked` [experts].
void mark_heaviest(std::span<const int32_t> ids, std::span<const float> weights, int count, std::vector<bool>& marked);

}  // namespace colibri::routing
