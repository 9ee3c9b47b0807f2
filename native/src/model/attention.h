// Multi-head latent attention in its absorbed form, and the indexer that limits it; reference/attention.py and sparse_index.py.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "colibri/engine.h"
#include "matrix.h"

namespace colibri {

// cos and sin of position * theta^(-2i / dim), in float64, rounded once. Interleaved pairs in, halves out.
class Rope {
  public:
    Rope(double theta, int64_t dim, int64_t positions);
    // Rotates the `dim` values at x for one position; `scratch` holds dim floats.
    void rotate(int64_t position, float* x, float* scratch) const;
    static int64_t memory_bytes(int64_t dim, int64_t positions) { return positions * dim * 4; }

  private:
    int64_t half_;
    Buffer<float> cos_, sin_;
};

// For each position of a step, the positions that it attends to; an empty list means all up to itself.
using Attended = std::vector<std::vector<int32_t>>;

struct AttentionScratch;

// The DSA indexer of one full layer, with its key cache.
class Indexer {
  public:
    Indexer(const ModelSpec& model, int64_t layer, int64_t context, const std::vector<std::string>& files);
    // Appends the keys of the step's normed inputs and, where a position has more than top-k candidates, chooses among them.
    void step(Products& products, const Rope& rope, AttentionScratch& scratch, int64_t n, int64_t start);
    const Buffer<float>& keys() const { return keys_; }
    int64_t dim() const { return spec_.dim; }

  private:
    struct Candidates;
    void choose(const Kernels& kernels, const float* query, const float* head_weights, Candidates& candidates,
                std::vector<int32_t>& chosen) const;

    IndexerSpec spec_;
    int64_t width_, q_rank_, rope_dim_;
    Weights wq_b_, wk_, k_norm_weight_, k_norm_bias_, weights_proj_;
    Buffer<float> keys_;  // [context][dim]
};

// Working memory of attention that all layers share.
struct AttentionScratch {
    Activations input, q_latent_input, output_input;
    Buffer<float> normed, q_latent, queries, kv, attended_values;
    Buffer<float> index_queries, index_weights, index_row;
    struct PerThread {
        Buffer<float> head_weights;  // one head of kv_b, dequantised
        Buffer<float> query, scores, context;
    };
    std::vector<PerThread> per_thread;
    Attended attended;  // the choice of the last full layer of this step
};

class Attention {
  public:
    Attention(const ModelSpec& model, int64_t layer, int64_t context, const std::vector<std::string>& files);
    // hidden [n][width] += attention(norm(hidden)); positions start … start + n - 1 enter the cache.
    void step(Products& products, const Rope& rope, AttentionScratch& scratch, float* hidden, int64_t n, int64_t start);
    const Buffer<float>& cache() const { return cache_; }
    const Indexer* indexer() const { return indexer_.get(); }
    static int64_t scratch_floats_per_position(const ModelSpec& model);

  private:
    void project(Products& products, const Rope& rope, AttentionScratch& scratch, const float* hidden, int64_t n, int64_t start);
    void attend_head(const Kernels& kernels, AttentionScratch& scratch, AttentionScratch::PerThread& mine, int64_t head, int64_t n,
                     int64_t start) const;

    const ModelSpec& model_;
    int64_t qk_, cache_width_;
    float scale_;
    Weights norm_, q_a_, q_a_norm_, q_b_, kv_a_, kv_a_norm_, kv_b_, o_;
    std::unique_ptr<Indexer> indexer_;
    Buffer<float> cache_;  // [context][kv_rank + rope]: latent, rotated key
};

}  // namespace colibri
