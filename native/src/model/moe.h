// The feed-forward half of a layer: a dense MLP, or router, budget, routed experts and shared experts; reference/moe.py.
#pragma once

#include <cstdint>
#include <span>
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
    Buffer<float> normed, gate, up, out, routed, shared;
    Buffer<float> router_logits;
    Buffer<float> slots;            // [position][top_k][width]: what each chosen expert gave, where experts go out of order
    std::vector<int32_t> rows;      // positions that use the expert at hand
    std::vector<int64_t> chosen;    // and where those stand in the selection's ids
    std::vector<int32_t> order;     // experts as the products take them
    std::vector<int32_t> resident;  // what the cache holds of the layer, where the policy asks
    Buffer<float> ahead_normed, ahead_logits;
    int64_t ahead_moe_index = -1;  // the layer whose experts were announced last, and which
    std::vector<int32_t> ahead;
};

void run_mlp(Products& products, const MlpViews& mlp, Activations& x, FeedForwardScratch& scratch, float* y);

struct MoEContext {
    Products& products;
    ExpertStore* store;
    const StoredExpert* shape;  // every expert's of the layer at hand; null where it is dense
    PhaseClock& clock;
    StepReport& report;
    bool traced;                              // products go in the order of the definition, for those who read the record
    std::span<const int64_t> row_votes = {};  // of the step's rows, where they are not all alike
};

class FeedForward {
  public:
    FeedForward(const ModelSpec& model, int64_t layer, int64_t moe_index, const std::vector<std::string>& files);
    bool sparse() const { return moe_index_ >= 0; }
    int64_t moe_index() const { return moe_index_; }
    // hidden [n][width] += mlp(norm(hidden)). Sparse layers fill `selection`; router logits stay in the scratch. Where the
    // store reads ahead, `next` is the sparse layer after this one, with its options; else null.
    struct Next {
        const FeedForward* layer;
        RoutingOptions options;
    };
    void step(MoEContext& context, FeedForwardScratch& scratch, const RoutingOptions& options, float* hidden, int64_t n,
              Selection* selection, const Next* next);
    // Announces to the store what this layer would choose if `hidden` were its input.
    void look_ahead(MoEContext& context, FeedForwardScratch& scratch, const RoutingOptions& options, const float* hidden,
                    int64_t n) const;
    static int64_t scratch_floats_per_position(const ModelSpec& model);
    static int64_t scratch_floats(const ModelSpec& model);  // whatever the number of positions

  private:
    void normalise(const Kernels& kernels, const float* hidden, int64_t n, float* out) const;
    Selection choose(MoEContext& context, FeedForwardScratch& scratch, const RoutingOptions& options, const float* normed,
                     int64_t n, Buffer<float>& logits) const;
    void count_avoided(MoEContext& context, const Selection& selection) const;
    bool set_order(const MoEContext& context, FeedForwardScratch& scratch, const Selection& selection, int64_t n) const;
    void run_experts(MoEContext& context, FeedForwardScratch& scratch, ExpertStore::Walk& walk, const Selection& selection,
                     int64_t n, bool in_order);

    const ModelSpec& model_;
    int64_t moe_index_;
    Weights norm_, gate_, up_, down_;  // the dense MLP, or the shared experts
    Weights router_;
    RouterSpec router_spec_;
};

}  // namespace colibri
