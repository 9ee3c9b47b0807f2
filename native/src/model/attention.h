// The attention half of a layer, in its two kinds: latent (MLA) and grouped-query (GQA); reference/attention.py.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "colibri/engine.h"
#include "indexer.h"
#include "matrix.h"
#include "rope.h"

namespace colibri {

constexpr int64_t kMixedTogether = 32;  // positions for which a dequantised row of values is used

// Working memory of attention that all layers share. MLA uses all of it, GQA what its kind has.
struct AttentionScratch {
    Activations input, q_latent_input, output_input;
    Buffer<float> normed, q_latent, queries, kv, mixed;
    Buffer<float> index_queries, index_weights;
    struct PerThread {
        Buffer<float> index_row;            // one row of wk or wq_b, dequantised
        Buffer<float> key_rows, value_row;  // of one head of kv_b, dequantised
        Buffer<float> query, scores;
        Buffer<float> contexts;  // of the positions whose values are formed together
    };
    std::vector<PerThread> per_thread;
    Attended attended;  // the choice of the last full layer of this step
};

// Input norm, a kind's projections and mix, output projection and residual. Every position is computed as if it were alone.
class Attention {
  public:
    static std::unique_ptr<Attention> make(const ModelSpec& model, int64_t layer, int64_t context,
                                           const std::vector<std::string>& files);
    virtual ~Attention() = default;
    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;

    // hidden [n][width] += attention(norm(hidden)); positions start … start + n - 1 enter the cache.
    void step(Products& products, const Rope& rope, AttentionScratch& scratch, float* hidden, int64_t n, int64_t start);
    const Buffer<float>& cache() const { return cache_; }
    virtual const Indexer* indexer() const { return nullptr; }

    // float32 values of the scratch: per position of a step, and per thread whatever the step.
    static int64_t scratch_floats_per_position(const ModelSpec& model);
    static int64_t scratch_floats_per_thread(const ModelSpec& model, int64_t context);

  protected:
    Attention(const ModelSpec& model, int64_t layer, int64_t context, const std::vector<std::string>& files);

    // From scratch.normed (also scratch.input) to rotated queries and new rows of the cache.
    virtual void project(Products& products, const Rope& rope, AttentionScratch& scratch, int64_t n, int64_t start) = 0;
    // From queries and cache to scratch.mixed [n][mixed_width].
    virtual void mix(Products& products, AttentionScratch& scratch, int64_t n, int64_t start) const = 0;

    Weights load(const char* name, Resident form, const std::vector<std::string>& files) const;

    const ModelSpec& model_;
    const AttentionSpec& spec_;
    int64_t layer_, cache_width_;
    Weights norm_, o_;
    Buffer<float> cache_;  // [context][cache_width]
};

// Latent attention, absorbed: the cache keeps latents and is never expanded. An indexer may limit it.
class MlaAttention : public Attention {
  public:
    MlaAttention(const ModelSpec& model, int64_t layer, int64_t context, const std::vector<std::string>& files);
    const Indexer* indexer() const override { return indexer_.get(); }

  protected:
    void project(Products& products, const Rope& rope, AttentionScratch& scratch, int64_t n, int64_t start) override;
    void mix(Products& products, AttentionScratch& scratch, int64_t n, int64_t start) const override;

  private:
    void mix_head(const Kernels& kernels, AttentionScratch& scratch, AttentionScratch::PerThread& mine, int64_t head, int64_t n,
                  int64_t start) const;
    void attend(const Kernels& kernels, const AttentionScratch& s, AttentionScratch::PerThread& mine, int64_t head, int64_t p,
                int64_t start, float* context) const;

    const MlaSpec& mla_;
    int64_t qk_;
    Weights q_a_, q_a_norm_, q_b_, kv_a_, kv_a_norm_, kv_b_;
    std::unique_ptr<Indexer> indexer_;
};

// Grouped-query attention: query head h reads key head h / (heads / kv_heads).
class GqaAttention : public Attention {
  public:
    GqaAttention(const ModelSpec& model, int64_t layer, int64_t context, const std::vector<std::string>& files);

  protected:
    void project(Products& products, const Rope& rope, AttentionScratch& scratch, int64_t n, int64_t start) override;
    void mix(Products& products, AttentionScratch& scratch, int64_t n, int64_t start) const override;

  private:
    // One of q, k, v: its product and what happens to it before rope.
    struct Projection {
        Weights matrix, bias, norm;
    };
    void finish(const Kernels& kernels, const Projection& part, int64_t heads, float* x) const;
    // Query heads [begin, end), which all read key head `kv_head`.
    void mix_heads(const Kernels& kernels, AttentionScratch& scratch, Buffer<float>& scores, int64_t kv_head, int64_t begin,
                   int64_t end, int64_t n, int64_t start) const;

    const GqaSpec& gqa_;
    int64_t group_;  // query heads per key head
    Projection q_, k_, v_;
};

}  // namespace colibri
