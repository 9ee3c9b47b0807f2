// One position's routing before any budget.
#include "position.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <functional>
#include <limits>

#include "exact_math.h"

namespace colibri::routing {
namespace {

// A key whose descending order is: larger value first, among equal values (also -0 and +0) the lower id. Keys are unique, so any
// sorting algorithm gives the one order.
uint64_t rank_key(float value, size_t id) {
    const auto bits = std::bit_cast<uint32_t>(value == 0.0f ? 0.0f : value);
    const uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
    return (static_cast<uint64_t>(ordered) << 32) | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}

int32_t key_id(uint64_t key) { return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(key)); }

// Brings the `count` largest keys to the front, in no order.
void select_largest(std::vector<uint64_t>& keys, size_t count) {
    if (count < keys.size()) {
        std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(count), keys.end(), std::greater<>());
    }
}

// A group's score: the float32 sum of its two largest choices.
float group_score(std::span<const float> choices) {
    float first = -std::numeric_limits<float>::infinity();
    float second = first;
    for (const float choice : choices) {
        if (choice > first) {
            second = first;
            first = choice;
        } else if (choice > second) {
            second = choice;
        }
    }
    return first + second;
}

}  // namespace

PositionRouter::PositionRouter(const RouterSpec& router, const RoutingOptions& options, int64_t experts)
    : router_(router),
      options_(options),
      scores_(static_cast<size_t>(experts)),
      exponentials_(router.score == Score::softmax ? static_cast<size_t>(experts) : 0),
      choice_(static_cast<size_t>(experts)) {
    candidates_.reserve(static_cast<size_t>(experts));
    groups_.reserve(static_cast<size_t>(router.n_group));
    by_score_.reserve(static_cast<size_t>(router.top_k));
}

int PositionRouter::route(std::span<const float> logits, std::span<int32_t> ids, std::span<float> picked) {
    rank_candidates(logits);
    // The first K in order are what TOPK cuts; so the smaller count is selected at once.
    const int wanted = options_.expert_topk > 0 ? std::min(options_.expert_topk, router_.top_k) : router_.top_k;
    const int count = take_first(wanted, ids, picked);
    const bool topp = options_.expert_topp > 0.0 && options_.expert_topp < 1.0;
    return topp ? apply_topp(count, ids, picked) : count;
}

int PositionRouter::pick_among(std::span<const float> logits, const std::vector<bool>& allowed, int count, std::span<int32_t> ids,
                               std::span<float> picked) {
    rank_candidates(logits);
    std::erase_if(candidates_, [&](uint64_t key) { return !allowed[key_id(key)]; });
    return take_first(count, ids, picked);
}

int PositionRouter::prefer_cached(std::span<const float> logits, const std::vector<bool>& cached, std::span<int32_t> ids,
                                  std::span<float> picked) {
    const size_t count = ids.size();
    const auto within = static_cast<size_t>(options_.route_within);
    if (within <= count) return 0;  // the ranking begins with the picks themselves
    rank_candidates(logits);
    std::erase_if(candidates_, [&](uint64_t key) { return std::find(ids.begin(), ids.end(), key_id(key)) != ids.end(); });
    const size_t others = std::min(candidates_.size(), within - count);
    select_largest(candidates_, others);
    std::sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(others), std::greater<>());

    // The best cached ones come in for the last picks that are not cached, as long as those are beyond the first J.
    size_t leaving = count;
    const auto next_to_leave = [&] {
        while (leaving > static_cast<size_t>(options_.route_top))
            if (!cached[ids[--leaving]]) return true;
        return false;
    };
    picks_.assign(count, 0);
    for (size_t i = 0; i < count; ++i) picks_[i] = rank_key(choice_[ids[i]], static_cast<size_t>(ids[i]));
    int came = 0;
    for (size_t i = 0; i < others; ++i) {
        if (!cached[key_id(candidates_[i])]) continue;
        if (!next_to_leave()) break;
        picks_[leaving] = candidates_[i];
        ++came;
    }
    std::sort(picks_.begin(), picks_.end(), std::greater<>());
    write(picks_, ids, picked);
    return came;
}

// Scores of all experts and rank keys of those that the position's groups allow.
void PositionRouter::rank_candidates(std::span<const float> logits) {
    if (router_.score == Score::sigmoid) {
        sigmoid_scores(logits, scores_);
    } else {
        softmax_scores(logits, scores_, exponentials_);
    }
    if (router_.bias.empty()) {
        choice_ = scores_;
    } else {
        for (size_t e = 0; e < scores_.size(); ++e) choice_[e] = scores_[e] + router_.bias[e];
    }
    collect_candidates();
}

// Writes the first candidates in order, at most `count`, and returns how many they are.
int PositionRouter::take_first(int count, std::span<int32_t> ids, std::span<float> picked) {
    const int taken = std::min(count, static_cast<int>(candidates_.size()));
    select_largest(candidates_, static_cast<size_t>(taken));
    std::sort(candidates_.begin(), candidates_.begin() + taken, std::greater<>());
    write(std::span(candidates_).first(static_cast<size_t>(taken)), ids, picked);
    return taken;
}

void PositionRouter::write(std::span<const uint64_t> keys, std::span<int32_t> ids, std::span<float> picked) const {
    for (size_t i = 0; i < keys.size(); ++i) {
        ids[i] = key_id(keys[i]);
        picked[i] = scores_[ids[i]];
    }
}

// Rank keys of the experts that the position may choose, by choice.
void PositionRouter::collect_candidates() {
    candidates_.clear();
    if (!groups_limit()) {
        for (size_t e = 0; e < choice_.size(); ++e) candidates_.push_back(rank_key(choice_[e], e));
        return;
    }
    const size_t size = choice_.size() / static_cast<size_t>(router_.n_group);
    const std::span<const float> choices(choice_);
    groups_.clear();
    for (size_t g = 0; g < static_cast<size_t>(router_.n_group); ++g) {
        groups_.push_back(rank_key(group_score(choices.subspan(g * size, size)), g));
    }
    select_largest(groups_, static_cast<size_t>(router_.topk_group));
    for (size_t i = 0; i < static_cast<size_t>(router_.topk_group); ++i) {
        const size_t first = static_cast<size_t>(key_id(groups_[i])) * size;
        for (size_t e = first; e < first + size; ++e) candidates_.push_back(rank_key(choice_[e], e));
    }
}

// Keeps the shortest prefix, by score, that holds the asked share; what stays is still in router order.
int PositionRouter::apply_topp(int count, std::span<int32_t> ids, std::span<float> picked) {
    by_score_.clear();
    for (int i = 0; i < count; ++i) by_score_.push_back(rank_key(picked[i], static_cast<size_t>(ids[i])));
    std::sort(by_score_.begin(), by_score_.end(), std::greater<>());

    // The total is the same running sum at its end, so both are added in the same order.
    double total = 0.0;
    for (const uint64_t key : by_score_) total += scores_[key_id(key)];
    const double enough = options_.expert_topp * total;
    double running = 0.0;
    uint64_t last_kept = by_score_.front();
    for (const uint64_t key : by_score_) {
        running += scores_[key_id(key)];
        last_kept = key;
        if (running >= enough) break;
    }

    int survivors = 0;
    for (int i = 0; i < count; ++i) {
        if (rank_key(picked[i], static_cast<size_t>(ids[i])) < last_kept) continue;
        ids[survivors] = ids[i];
        picked[survivors] = picked[i];
        ++survivors;
    }
    return survivors;
}

double ordered_sum(std::span<const float> scores) {
    double sum = 0.0;
    for (const float score : scores) sum += score;
    return sum;
}

void gate_weights(const RouterSpec& router, std::span<const float> scores, double sum, std::span<float> weights) {
    for (size_t i = 0; i < scores.size(); ++i) {
        const double scaled = static_cast<double>(scores[i]) * router.routed_scaling_factor;
        weights[i] = to_float32(router.norm_topk_prob ? scaled / (sum + 1e-20) : scaled);
    }
}

}  // namespace colibri::routing
