// The DSA indexer: score_TS = sum_I w_TI * relu(q_TIJ . k_SJ * J^-1/2); the top-k positions stay, ties to the lowest.
#include "indexer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

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

void Indexer::step(Products& products, const Rope& rope, const float* normed, const float* q_latent, int64_t n, int64_t start,
                   Attended& attended) {
    const Kernels& kernels = products.kernels();
    const int64_t dim = spec_.dim, heads = spec_.heads;
    row_.reserve(std::max(width_, q_rank_));
    std::vector<float> scratch(std::max(dim, rope_dim_));

    for (int64_t j = 0; j < dim; ++j) {
        wk_.row(kernels, j, row_.data());
        for (int64_t p = 0; p < n; ++p) keys_[(start + p) * dim + j] = kernels.dot(row_.data(), normed + p * width_, width_);
    }
    for (int64_t p = 0; p < n; ++p) {
        float* key = keys_.data() + (start + p) * dim;
        kernels.layer_norm(key, k_norm_weight_.f32(), k_norm_bias_.f32(), spec_.eps, dim, key);
        rope.rotate(start + p, key, scratch.data());
    }

    attended.assign(n, {});
    if (start + n <= spec_.topk) return;

    // Only positions with more than top-k candidates need a choice.
    const int64_t first = std::max<int64_t>(0, spec_.topk - start);
    queries_.reserve(n * heads * dim);
    head_weights_.reserve(n * heads);
    for (int64_t r = 0; r < heads * dim; ++r) {
        wq_b_.row(kernels, r, row_.data());
        for (int64_t p = first; p < n; ++p)
            queries_[p * heads * dim + r] = kernels.dot(row_.data(), q_latent + p * q_rank_, q_rank_);
    }
    const float head_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(heads)));
    products.pool().parallel_for(n - first, (n - first) * (start + n) * heads * dim, [&](int64_t begin, int64_t end, int) {
        std::vector<float> scores(start + n), relu(heads), rotated(std::max(dim, rope_dim_));
        for (int64_t p = first + begin; p < first + end; ++p) {
            for (int64_t h = 0; h < heads; ++h) {
                rope.rotate(start + p, queries_.data() + (p * heads + h) * dim, rotated.data());
                head_weights_[p * heads + h] =
                    kernels.dot(weights_proj_.f32() + h * width_, normed + p * width_, width_) * head_scale;
            }
            choose(kernels, queries_.data() + p * heads * dim, head_weights_.data() + p * heads, start + p + 1, scores.data(),
                   relu.data(), attended[p]);
        }
    });
}

void Indexer::choose(const Kernels& kernels, const float* query, const float* head_weights, int64_t count, float* scores,
                     float* relu, std::vector<int32_t>& chosen) const {
    const int64_t dim = spec_.dim, heads = spec_.heads;
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
    for (int64_t s = 0; s < count; ++s) {
        for (int64_t h = 0; h < heads; ++h) {
            const float score = kernels.dot(query + h * dim, keys_.data() + s * dim, dim) * scale;
            relu[h] = score > 0.0f ? score : 0.0f;
        }
        scores[s] = kernels.dot(head_weights, relu, heads);
        if (!std::isfinite(scores[s]))
            throw Error("NonFiniteActivationError", "an indexer score is not finite",
                        "position " + std::to_string(count - 1) + ", attended position " + std::to_string(s), "a finite value",
                        std::to_string(scores[s]));
    }
    chosen.resize(count);
    std::iota(chosen.begin(), chosen.end(), 0);
    std::nth_element(chosen.begin(), chosen.begin() + spec_.topk - 1, chosen.end(),
                     [scores](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    chosen.resize(spec_.topk);
    std::sort(chosen.begin(), chosen.end());
}

}  // namespace colibri
