// Which experts of a step's union a budget keeps: one pure function per policy.
#include "budget.h"

#include <algorithm>

#include "colibri/error.h"

namespace colibri::routing {
namespace {

// `aggregate`: the N largest votes, ties to the lowest id.
std::vector<int32_t> keep_aggregate(const Ballot& ballot, const RoutingOptions& options) {
    std::vector<int32_t> kept(ballot.members.begin(), ballot.members.end());
    const auto first_dropped = kept.begin() + options.budget;
    std::nth_element(kept.begin(), first_dropped, kept.end(), [&](int32_t a, int32_t b) {
        return ballot.votes[a] != ballot.votes[b] ? ballot.votes[a] > ballot.votes[b] : a < b;
    });
    kept.erase(first_dropped, kept.end());
    std::sort(kept.begin(), kept.end());
    return kept;
}

}  // namespace

std::vector<int32_t> keep_experts(const Ballot& ballot, const RoutingOptions& options) {
    switch (options.policy) {
        case Policy::aggregate:
            return keep_aggregate(ballot, options);
    }
    throw Error("EngineError", "a policy without a rule", "policy");
}

}  // namespace colibri::routing
