// Which experts of a step's union a budget keeps.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "colibri/routing.h"

namespace colibri::routing {

// What the policies judge by. `members` is the union, ascending; `votes` [experts] is each expert's aggregate in units of 2^-32.
struct Ballot {
    std::span<const int32_t> members;
    std::span<const int64_t> votes;
};

// The experts to keep, ascending, by the policy that `options` names. Called only where the budget acts: 0 < budget < |members|.
std::vector<int32_t> keep_experts(const Ballot& ballot, const RoutingOptions& options);

}  // namespace colibri::routing
