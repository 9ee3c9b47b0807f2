// Which experts of a step's union a budget keeps. Every policy secures some and fills up by votes.
#include "budget.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

namespace colibri::routing {
namespace {

// How many of `by_votes`, all candidates in descending order of votes, `coverage` adds: it looks before each addition.
size_t additions_to_cover(const Ballot& ballot, std::span<const int32_t> by_votes, size_t most, double share) {
    int64_t held = 0;
    for (const int32_t id : ballot.secured) held += ballot.votes[id];
    int64_t all = held;
    for (const int32_t id : by_votes) all += ballot.votes[id];
    const double enough = share * static_cast<double>(all);
    size_t added = 0;
    while (added < most && static_cast<double>(held) < enough) held += ballot.votes[by_votes[added++]];
    return added;
}

}  // namespace

bool budget_acts(const RoutingOptions& options, int64_t union_size) {
    if (options.policy == Policy::cache_route) return options.route_within > 0;
    if (options.policy == Policy::coverage && options.coverage < 1.0) return true;
    return options.budget > 0 && union_size > options.budget;
}

bool acts_on_positions(Policy policy) { return policy == Policy::per_position || policy == Policy::cache_route; }

bool has_floor(Policy policy) { return policy == Policy::floor || policy == Policy::substitute || policy == Policy::coverage; }

std::vector<int32_t> keep_experts(const Ballot& ballot, const RoutingOptions& options) {
    std::vector<int32_t> kept(ballot.secured.begin(), ballot.secured.end());
    std::vector<int32_t> others;
    others.reserve(ballot.members.size() - kept.size());
    std::set_difference(ballot.members.begin(), ballot.members.end(), kept.begin(), kept.end(), std::back_inserter(others));
    const auto more_votes = [&](int32_t a, int32_t b) {
        return ballot.votes[a] != ballot.votes[b] ? ballot.votes[a] > ballot.votes[b] : a < b;
    };

    size_t additions = others.size();
    if (options.budget > 0) {
        const auto budget = static_cast<size_t>(options.budget);
        additions = budget > kept.size() ? std::min(additions, budget - kept.size()) : 0;
    }
    if (options.policy == Policy::coverage) {
        std::sort(others.begin(), others.end(), more_votes);
        additions = additions_to_cover(ballot, others, additions, options.coverage);
    } else if (additions < others.size()) {
        std::nth_element(others.begin(), others.begin() + static_cast<std::ptrdiff_t>(additions), others.end(), more_votes);
    }
    kept.insert(kept.end(), others.begin(), others.begin() + static_cast<std::ptrdiff_t>(additions));
    std::sort(kept.begin(), kept.end());
    return kept;
}

void mark_heaviest(std::span<const int32_t> ids, std::span<const float> weights, int count, std::vector<bool>& marked) {
    // Ascending pairs are descending weights, ties by ascending id.
    std::vector<std::pair<float, int32_t>> order(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) order[i] = {-weights[i], ids[i]};
    const size_t heaviest = std::min(order.size(), static_cast<size_t>(count));
    std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(heaviest), order.end());
    for (size_t i = 0; i < heaviest; ++i) marked[order[i].second] = true;
}

}  // namespace colibri::routing
