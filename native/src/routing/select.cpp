// select_experts: every position's routing, then the budget over their union.
#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "budget.h"
#include "colibri/error.h"
#include "colibri/routing.h"
#include "exact_math.h"
#include "position.h"

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

// One step between routing and budget. Slots of a position lie at [position · top_k, + count), in router order.
class Step {
  public:
    Step(std::span<const float> logits, int64_t positions, int64_t experts, const RouterSpec& router, const RoutingOptions& options)
        : router_(router), options_(options), experts_(experts), picked_(static_cast<size_t>(positions) * router.top_k) {
        out_.positions = positions;
        out_.top_k = router.top_k;
        out_.ids.assign(picked_.size(), -1);
        out_.weights.assign(picked_.size(), 0.0f);
        counts_.reserve(positions);
        route(logits);
    }

    Selection finish() && {
        out_.union_size = static_cast<int64_t>(out_.kept.size());
        if (options_.budget > 0 && out_.union_size > options_.budget) apply_budget();
        return std::move(out_);
    }

  private:
    std::span<int32_t> ids(int64_t row, int count) { return std::span(out_.ids).subspan(row * out_.top_k, count); }
    std::span<float> weights(int64_t row, int count) { return std::span(out_.weights).subspan(row * out_.top_k, count); }
    std::span<float> picked(int64_t row, int count) { return std::span(picked_).subspan(row * out_.top_k, count); }

    // Steps 1 to 6 of every position: ids, weights, the union (in `kept`) and the votes.
    void route(std::span<const float> logits) {
        PositionRouter position(router_, options_, experts_);
        const bool votes = options_.budget > 0;
        const bool all_scores = votes && options_.vote == Vote::all_scores;
        votes_.assign(votes ? experts_ : 0, 0);
        std::vector<bool> used(experts_, false);
        for (int64_t row = 0; row < out_.positions; ++row) {
            const int count =
                position.route(logits.subspan(row * experts_, experts_), ids(row, out_.top_k), picked(row, out_.top_k));
            counts_.push_back(count);
            // A pick that TOPP took away leaves its id behind it.
            std::fill(ids(row, out_.top_k).begin() + count, ids(row, out_.top_k).end(), -1);
            gate_weights(router_, picked(row, count), ordered_sum(picked(row, count)), weights(row, count));
            for (const int32_t id : ids(row, count)) used[id] = true;
            if (all_scores) {
                for (int64_t e = 0; e < experts_; ++e) votes_[e] += to_units(position.scores()[e]);
            } else if (votes) {
                for (int i = 0; i < count; ++i) votes_[ids(row, count)[i]] += to_units(weights(row, count)[i]);
            }
        }
        for (int64_t e = 0; e < experts_; ++e) {
            if (used[e]) out_.kept.push_back(static_cast<int32_t>(e));
        }
    }

    void apply_budget() {
        const std::vector<int32_t> members = std::move(out_.kept);
        out_.kept = keep_experts({members, votes_}, options_);
        std::set_difference(members.begin(), members.end(), out_.kept.begin(), out_.kept.end(), std::back_inserter(out_.removed));
        out_.dropped = static_cast<int64_t>(out_.removed.size());
        std::vector<bool> removed(experts_, false);
        for (const int32_t id : out_.removed) removed[id] = true;

        int64_t mass_before = 0;
        int64_t mass_after = 0;
        for (int64_t row = 0; row < out_.positions; ++row) {
            for (const float score : picked(row, counts_[row])) mass_before += to_units(score);
            const int left = cut_position(row, removed);
            for (const float score : picked(row, left)) mass_after += to_units(score);
        }
        if (mass_before > 0) out_.mass_kept = static_cast<double>(mass_after) / static_cast<double>(mass_before);
    }

    // Takes the removed experts from one position and weighs the survivors again; returns how many they are.
    int cut_position(int64_t row, const std::vector<bool>& removed) {
        const int count = counts_[row];
        const auto row_ids = ids(row, count);
        const auto row_picked = picked(row, count);
        const double sum_before = ordered_sum(row_picked);
        int left = 0;
        for (int i = 0; i < count; ++i) {
            if (removed[row_ids[i]]) continue;
            row_ids[left] = row_ids[i];
            row_picked[left] = row_picked[i];
            ++left;
        }
        if (left == count) return count;
        out_.dropped_slots += count - left;
        out_.emptied_positions += left == 0;
        std::fill(row_ids.begin() + left, row_ids.end(), -1);
        std::fill(weights(row, count).begin() + left, weights(row, count).end(), 0.0f);
        const double sum = options_.denominator == Denominator::frozen ? sum_before : ordered_sum(picked(row, left));
        gate_weights(router_, picked(row, left), sum, weights(row, left));
        return left;
    }

    const RouterSpec& router_;
    const RoutingOptions& options_;
    const int64_t experts_;
    std::vector<float> picked_;   // [positions][top_k]: scores of the chosen
    std::vector<int> counts_;     // [positions]: chosen after TOPP
    std::vector<int64_t> votes_;  // [experts], in units of 2^-32; empty without a budget
    Selection out_;
};

}  // namespace

Selection select_experts(std::span<const float> logits, int64_t positions, int64_t experts, const RouterSpec& router,
                         const RoutingOptions& options) {
    check_logits(logits, positions, experts, router);
    return Step(logits, positions, experts, router, options).finish();
}

}  // namespace colibri
