// The DSA indexer of one full layer: which positions a row attends to; reference/sparse_index.py.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "colibri/engine.h"
#include "matrix.h"
#include "rope.h"

namespace colibri {

// For each position of a step, the positions that it attends to; an empty list means all up to itself.
using Attended = std::vector<std::vector<int32_t>>;

struct AttentionScratch;

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

}  // namespace colibri
