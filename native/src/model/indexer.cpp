// The DSA indexer: score_TS = sum_I w_TI * relu(q_TIJ . k_SJ * J^-1/2); the top-k positions stay, ties to the lowest.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attention.h"
#include "colibri/error.h"

namespace colibri {

Indexer::Indexer(const ModelSpec& model, int64_t layer, int64_t context, const std::vector<std::string>& files)
    : spec_(model.indexer),
      width_(model.width),
      q_rank_(model.attention.mla().q_rank),
      rope_dim_(model.attention.rope.dim),
      keys_(context * model.indexer.dim) {
    const auto load = [&](const char* name, Resident form) {
        const std::string role = "layers." + std::to_string(layer) + ".indexer." + name;
        return Weights(role, model.tensors.at(role), form, files);
    };
    wq_b_ = load("wq_b", Resident::row_major);
    wk_ = load("wk", Resident::row_major);
    k_norm_weight_ = load("k_norm_weight", Resident::f32);
    k_norm_bias_ = load("k_norm_bias", Resident::f32);
    weights_proj_ = load("weights_proj", Resident::f32);
}

// What one thread needs to choose positions.
struct Indexer::Candidates {
    Candidates(int64_t positions, int64_t heads, int64_t width)
        : scores(positions), order(positions), relu(heads), rotated(width) {}
    int64_t count = 0;  // positions to choose from
    std::vector<float> scores;
    std::vector<int32_t> order;
    std::vector<float> relu, rotated;
};

void Indexer::step(Products& products, const Rope& rope, AttentionScratch& s, int64_t n, int64_t start) {
    const Kernels& kernels = products.kernels();
    const int64_t dim = spec_.dim, heads = spec_.heads;
    const float* normed = s.normed.data();
    std::vector<float> scratch(std::max(dim, rope_dim_));
    const auto row_of = [&](int thread) {
        Buffer<float>& row = s.per_thread[thread].index_row;
        row.reserve(std::max(width_, q_rank_));
        return row.data();
    };

    products.pool().parallel_for(dim, dim * width_ * (4 + n), [&](int64_t begin, int64_t end, int thread) {
        float* row = row_of(thread);
        for (int64_t j = begin; j < end; ++j) {
            wk_.row(kernels, j, row);
            for (int64_t p = 0; p < n; ++p) keys_[(start + p) * dim + j] = kernels.dot(row, normed + p * width_, width_);
        }
    });
    for (int64_t p = 0; p < n; ++p) {
        float* key = keys_.data() + (start + p) * dim;
        kernels.layer_norm(key, k_norm_weight_.f32(), k_norm_bias_.f32(), spec_.eps, dim, key);
        rope.rotate(start + p, key, scratch.data());
    }

    s.attended.assign(n, {});
    if (start + n <= spec_.topk) return;

    // Only positions with more than top-k candidates need a choice.
    const int64_t first = std::max<int64_t>(0, spec_.topk - start);
    s.index_queries.reserve(n * heads * dim);
    s.index_weights.reserve(n * heads);
    products.pool().parallel_for(heads * dim, heads * dim * q_rank_ * (4 + n), [&](int64_t begin, int64_t end, int thread) {
        float* row = row_of(thread);
        for (int64_t r = begin; r < end; ++r) {
            wq_b_.row(kernels, r, row);
            for (int64_t p = first; p < n; ++p)
                s.index_queries[p * heads * dim + r] = kernels.dot(row, s.q_latent.data() + p * q_rank_, q_rank_);
        }
    });
    const float head_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(heads)));
    products.pool().parallel_for(n - first, (n - first) * (start + n) * heads * dim, [&](int64_t begin, int64_t end, int) {
        Candidates candidates(start + n, heads, std::max(dim, rope_dim_));
        for (int64_t p = first + begin; p < first + end; ++p) {
            float* query = s.index_queries.data() + p * heads * dim;
            float* weights = s.index_weights.data() + p * heads;
            for (int64_t h = 0; h < heads; ++h) {
                rope.rotate(start + p, query + h * dim, candidates.rotated.data());
                weights[h] = kernels.dot(weights_proj_.f32() + h * width_, normed + p * width_, width_) * head_scale;
            }
            candidates.count = start + p + 1;
            choose(kernels, query, weights, candidates, s.attended[p]);
        }
    });
}

void Indexer::choose(const Kernels& kernels, const float* query, const float* head_weights, Candidates& candidates,
                     std::vector<int32_t>& chosen) const {
    const int64_t dim = spec_.dim, heads = spec_.heads, count = candidates.count;
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
    const std::vector<float>& scores = candidates.scores;
    for (int64_t s = 0; s < count; ++s) {
        for (int64_t h = 0; h < heads; ++h) {
            const float score = kernels.dot(query + h * dim, keys_.data() + s * dim, dim) * scale;
            candidates.relu[h] = score > 0.0f ? score : 0.0f;
        }
        candidates.scores[s] = kernels.dot(head_weights, candidates.relu.data(), heads);
        if (!std::isfinite(scores[s]))
            throw Error("NonFiniteActivationError", "an indexer score is not finite",
                        "position " + std::to_string(count - 1) + ", attended position " + std::to_string(s), "a finite value",
                        std::to_string(scores[s]));
    }
    const auto begin = candidates.order.begin();
    std::iota(begin, begin + count, 0);
    std::nth_element(begin, begin + spec_.topk - 1, begin + count,
                     [&scores](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    chosen.assign(begin, begin + spec_.topk);
    std::sort(chosen.begin(), chosen.end());
}

}  // namespace colibri
