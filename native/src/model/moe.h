// The feed-forward half of a layer: a dense MLP, or router, budget, routed experts and shared experts; reference/moe.py.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "colibri/engine.h"
#include "matrix.h"
#include "phase_clock.h"

namespace colibri {

// down(silu(gate(x)) * up(x)).
struct MlpViews {
    MatrixView gate, up, down;
};

// Working memory of the feed-forward half that all layers share.
struct FeedForwardScratch {
    Activations input, gathered, hidden_input;
    Buffer<float> normed, gate, up, out, routed;
    Buffer<float> router_logits;
    std::vector<int32_t> rows;  // positions that use the expert at hand
    std::vector<float> row_weights;
    std::vector<int32_t> resident;  // what the cache holds of the layer, where the policy asks
};

void run_mlp(Products& products, const MlpViews& mlp, Activations& x, FeedForwardScratch& scratch, float* y);

struct MoEContext {
    Products& products;
    ExpertStore* store;
    const StoredExpert* shape;  // every expert's; null without MoE layers
    PhaseClock& clock;
    StepReport& report;
};

class FeedForward {
  public:
    FeedForward(const ModelSpec& model, int64_t layer, int64_t moe_index, const std::vector<std::string>& files);
    bool sparse() const { return moe_index_ >= 0; }
    int64_t moe_index() const { return moe_index_; }
    // hidden [n][width] += mlp(norm(hidden)). Sparse layers fill `selection`; router logits stay in the scratch.
    void step(MoEContext& context, FeedForwardScratch& scratch, const RoutingOptions& options, float* hidden, int64_t n,
              Selection* selection);
    static int64_t scratch_floats_per_position(const ModelSpec& model);

  private:
    void route(MoEContext& context, FeedForwardScratch& scratch, const RoutingOptions& options, int64_t n, Selection& selection);
    void run_experts(MoEContext& context, FeedForwardScratch& scratch, const Selection& selection, int64_t n);

    const ModelSpec& model_;
    int64_t moe_index_;
    Weights norm_, gate_, up_, down_;  // the dense MLP, or the shared experts
    Weights router_;
    RouterSpec router_spec_;
};

}  // namespace colibri
