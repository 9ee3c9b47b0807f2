// select_experts: every position's routing, then the budget over their union.
#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "budget.h"
#include "colibri/error.h"
#include "colibri/routing.h"
#include "exact_math.h"
#include "position.h"
#include "rows_alone.h"

namespace colibri {
namespace {

using namespace routing;

void check_logits(std::span<const float> logits, int64_t positions, int64_t experts, const RouterSpec& router) {
    if (positions < 1 || experts < 1 || static_cast<int64_t>(logits.size()) != positions * experts) {
        throw Error("EngineError", "router logits of another size than the step", "select_experts",
                    std::to_string(positions) + " x " + std::to_string(experts), std::to_string(logits.size()));
    }
    constexpr uint32_t kExponent = 0x7F800000u;
    for (size_t i = 0; i < logits.size(); ++i) {
        if ((std::bit_cast<uint32_t>(logits[i]) & kExponent) != kExponent) continue;
        const auto row = static_cast<int64_t>(i) / experts;
        throw Error("NonFiniteLogitError", "non-finite router logit",
                    "position " + std::to_string(row) + ", expert " + std::to_string(static_cast<int64_t>(i) - row * experts),
                    "finite",
                    std::isnan(logits[i]) ? "nan"
                    : logits[i] > 0.0f    ? "inf"
                                          : "-inf");
    }
    if (router.score == Score::softmax && experts > kMaxSoftmaxExperts) {
        throw Error("ConfigError", "too many experts for an exact softmax", "experts", "<= " + std::to_string(kMaxSoftmaxExperts),
                    std::to_string(experts));
    }
}

void check_row_votes(std::span<const int64_t> row_votes, int64_t positions, const RoutingOptions& options) {
    if (row_votes.empty()) return;
    const auto refuse = [](const char* what, const std::string& expected, const std::string& got) {
        throw Error("OptionError", what, "row_votes", expected, got);
    };
    const auto given = static_cast<int64_t>(row_votes.size());
    if (given != positions) refuse("votes of other rows than the step's", std::to_string(positions), std::to_string(given));
    if (given > kMostVotingRows)
        refuse("weighed votes of so many rows are not exact", "at most " + std::to_string(kMostVotingRows), std::to_string(given));
    if (options.rows_alone) refuse("rows that are routed alone do not vote together", "none", std::to_string(given));
    for (const int64_t vote : row_votes)
        if (vote < 0 || vote > kFullVote)
            refuse("vote of a row out of range", "0 to " + std::to_string(kFullVote), std::to_string(vote));
}

// One step between routing and budget. Slots of a position lie at [position · top_k, + count), in router order.
class Step {
  public:
    Step(std::span<const float> logits, int64_t positions, int64_t experts, const RouterSpec& router, const RoutingOptions& options,
         std::span<const int64_t> row_votes)
        : logits_(logits),
          row_votes_(row_votes),
          router_(router),
          options_(options),
          experts_(experts),
          position_router_(router, options, experts),
          picked_(static_cast<size_t>(positions) * router.top_k) {
        out_.positions = positions;
        out_.top_k = router.top_k;
        out_.ids.assign(picked_.size(), -1);
        out_.weights.assign(picked_.size(), 0.0f);
        counts_.reserve(positions);
        route();
    }

    Selection finish(std::span<const int32_t> resident) && {
        out_.union_size = static_cast<int64_t>(out_.kept.size());
        if (budget_acts(options_, out_.union_size)) apply_budget(resident);
        return std::move(out_);
    }

  private:
    std::span<const float> logits(int64_t row) const { return logits_.subspan(row * experts_, experts_); }
    std::span<int32_t> ids(int64_t row, int count) { return std::span(out_.ids).subspan(row * out_.top_k, count); }
    std::span<float> weights(int64_t row, int count) { return std::span(out_.weights).subspan(row * out_.top_k, count); }
    std::span<float> picked(int64_t row, int count) { return std::span(picked_).subspan(row * out_.top_k, count); }

    // Steps 1 to 6 of every position: ids, weights, the union (in `kept`) and the votes.
    void route() {
        // The union is not known yet: votes are counted where the budget would act on some.
        const bool votes = !acts_on_positions(options_.policy) && budget_acts(options_, std::numeric_limits<int64_t>::max());
        const bool all_scores = votes && options_.vote == Vote::all_scores;
        votes_.assign(votes ? experts_ : 0, 0);
        for (int64_t row = 0; row < out_.positions; ++row) {
            const int count = position_router_.route(logits(row), ids(row, out_.top_k), picked(row, out_.top_k));
            counts_.push_back(count);
            // A pick that TOPP took away leaves its id behind it.
            std::fill(ids(row, out_.top_k).begin() + count, ids(row, out_.top_k).end(), -1);
            gate_weights(router_, picked(row, count), ordered_sum(picked(row, count)), weights(row, count));
            const int64_t vote = row_votes_.empty() ? 1 : row_votes_[row];
            if (all_scores) {
                for (int64_t e = 0; e < experts_; ++e) votes_[e] += vote * to_units(position_router_.scores()[e]);
            } else if (votes) {
                for (int i = 0; i < count; ++i) votes_[ids(row, count)[i]] += vote * to_units(weights(row, count)[i]);
            }
        }
        out_.kept = used_experts();
    }

    // Experts that any position has now, ascending.
    std::vector<int32_t> used_experts() const {
        std::vector<bool> used(experts_, false);
        for (const int32_t id : out_.ids) {
            if (id >= 0) used[id] = true;
        }
        return marked_ids(used);
    }

    std::vector<int32_t> marked_ids(const std::vector<bool>& marked) const {
        std::vector<int32_t> found;
        for (int64_t e = 0; e < experts_; ++e) {
            if (marked[e]) found.push_back(static_cast<int32_t>(e));
        }
        return found;
    }

    void apply_budget(std::span<const int32_t> resident) {
        const std::vector<int32_t> members = std::move(out_.kept);
        // Experts that stay; of `cache_route`, those that the cache holds.
        std::vector<bool> marked(experts_, false);
        if (options_.policy == Policy::cache_route) {
            for (const int32_t id : resident) marked[id] = true;
        } else if (!acts_on_positions(options_.policy)) {
            const std::vector<int32_t> secured = secured_experts(members, resident);
            out_.kept = keep_experts({members, votes_, secured}, options_);
            for (const int32_t id : out_.kept) marked[id] = true;
        }

        int64_t mass_before = 0;
        int64_t mass_after = 0;
        for (int64_t row = 0; row < out_.positions; ++row) {
            for (const float score : picked(row, counts_[row])) mass_before += to_units(score);
            const int left = act_on_position(row, marked);
            for (const float score : picked(row, left)) mass_after += to_units(score);
        }
        if (mass_before > 0) out_.mass_kept = static_cast<double>(mass_after) / static_cast<double>(mass_before);

        // A position that picks again may leave the last use of an expert that the policy kept.
        if (acts_on_positions(options_.policy) || options_.policy == Policy::substitute) out_.kept = used_experts();
        std::set_difference(members.begin(), members.end(), out_.kept.begin(), out_.kept.end(), std::back_inserter(out_.removed));
        out_.dropped = static_cast<int64_t>(out_.removed.size());
    }

    // Members that stay whatever their votes, ascending.
    std::vector<int32_t> secured_experts(const std::vector<int32_t>& members, std::span<const int32_t> resident) {
        std::vector<bool> secured(experts_, false);
        if (has_floor(options_.policy)) {
            for (int64_t row = 0; row < out_.positions; ++row) {
                mark_heaviest(ids(row, counts_[row]), weights(row, counts_[row]), options_.floor, secured);
            }
        } else if (options_.policy == Policy::resident) {
            std::vector<bool> member(experts_, false);
            for (const int32_t id : members) member[id] = true;
            for (const int32_t id : resident) secured[id] = member[id];
        } else {
            return {};
        }
        return marked_ids(secured);
    }

    // What the policy does to one position; returns how many experts it has then.
    int act_on_position(int64_t row, const std::vector<bool>& marked) {
        if (options_.policy == Policy::per_position) return cut_alone(row);
        return options_.policy == Policy::cache_route ? exchange(row, marked) : cut_position(row, marked);
    }

    // `cache_route`: as many picks as before, of which cached experts have replaced some.
    int exchange(int64_t row, const std::vector<bool>& cached) {
        const int count = counts_[row];
        const double sum_before = ordered_sum(picked(row, count));
        const int came = position_router_.prefer_cached(logits(row), cached, ids(row, count), picked(row, count));
        out_.dropped_slots += came;
        if (came > 0) weigh_again(row, count, sum_before);
        return count;
    }

    // Cuts one position to the experts that stay.
    int cut_position(int64_t row, const std::vector<bool>& stays) {
        const int count = counts_[row];
        const bool lost = std::any_of(ids(row, count).begin(), ids(row, count).end(), [&](int32_t id) { return !stays[id]; });
        if (!lost) return count;
        if (options_.policy == Policy::substitute) return pick_again(row, stays);
        return keep_picks(row, [&](int i) { return static_cast<bool>(stays[ids(row, count)[i]]); });
    }

    // `per_position`: the position is a step of its own under `aggregate`.
    int cut_alone(int64_t row) {
        const int count = counts_[row];
        if (count <= options_.budget) return count;
        const std::span<const float> voters = options_.vote == Vote::all_scores ? picked(row, count) : weights(row, count);
        // Ascending pairs are descending votes, ties by ascending id.
        std::vector<std::pair<int64_t, int32_t>> order(count);
        for (int i = 0; i < count; ++i) order[i] = {-to_units(voters[i]), ids(row, count)[i]};
        std::vector<std::pair<int64_t, int32_t>> ranked = order;
        const auto last_kept = ranked.begin() + (options_.budget - 1);
        std::nth_element(ranked.begin(), last_kept, ranked.end());
        return keep_picks(row, [&](int i) { return order[i] <= *last_kept; });
    }

    // Takes from a position the picks i for which `stays(i)` is false, at least one, and weighs the others again.
    template <typename Stays>
    int keep_picks(int64_t row, Stays stays) {
        const int count = counts_[row];
        const double sum_before = ordered_sum(picked(row, count));
        int left = 0;
        for (int i = 0; i < count; ++i) {
            if (!stays(i)) continue;
            ids(row, count)[left] = ids(row, count)[i];
            picked(row, count)[left] = picked(row, count)[i];
            ++left;
        }
        out_.dropped_slots += count - left;
        weigh_again(row, left, sum_before);
        return left;
    }

    // `substitute`: as many picks as before, by choice, of the experts that stay; all of them where they are fewer.
    int pick_again(int64_t row, const std::vector<bool>& stays) {
        const int count = counts_[row];
        const double sum_before = ordered_sum(picked(row, count));
        const std::vector<int32_t> before(ids(row, count).begin(), ids(row, count).end());
        const int left = position_router_.pick_among(logits(row), stays, count, ids(row, count), picked(row, count));
        const auto now = ids(row, left);
        for (const int32_t id : before) out_.dropped_slots += std::find(now.begin(), now.end(), id) == now.end();
        weigh_again(row, left, sum_before);
        return left;
    }

    // Step 5 over the first `left` picks of a position that lost something; empties the slots behind them.
    void weigh_again(int64_t row, int left, double sum_before) {
        const int count = counts_[row];
        out_.emptied_positions += left == 0;
        std::fill(ids(row, count).begin() + left, ids(row, count).end(), -1);
        std::fill(weights(row, count).begin() + left, weights(row, count).end(), 0.0f);
        const double sum = options_.denominator == Denominator::frozen ? sum_before : ordered_sum(picked(row, left));
        gate_weights(router_, picked(row, left), sum, weights(row, left));
    }

    const std::span<const float> logits_;
    const std::span<const int64_t> row_votes_;  // empty: all alike
    const RouterSpec& router_;
    const RoutingOptions& options_;
    const int64_t experts_;
    PositionRouter position_router_;
    std::vector<float> picked_;   // [positions][top_k]: scores of the chosen
    std::vector<int> counts_;     // [positions]: chosen after TOPP
    std::vector<int64_t> votes_;  // [experts], in units of 2^-32, or 2^-48 with row votes; empty where no policy asks for them
    Selection out_;
};

}  // namespace

Selection select_experts(std::span<const float> logits, int64_t positions, int64_t experts, const RouterSpec& router,
                         const RoutingOptions& options, std::span<const int32_t> resident, std::span<const int64_t> row_votes) {
    check_logits(logits, positions, experts, router);
    check_row_votes(row_votes, positions, options);
    if (options.rows_alone) return routing::select_rows_alone(logits, positions, experts, router, options);
    return Step(logits, positions, experts, router, options, row_votes).finish(resident);
}

}  // namespace colibri
