// The MTP block: one more decoder layer, which scores the token after next; reference/mtp.py.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention.h"
#include "colibri/engine.h"
#include "moe.h"

namespace colibri {

// The block's weights and caches, which follow the trunk's at their own pace. Embedding, head and scratch are the engine's.
class MtpBlock {
  public:
    MtpBlock(const ModelSpec& model, int64_t context, const std::vector<std::string>& files);

    struct Shared {
        const Weights& embed;
        const Rope& rope;
        AttentionScratch& attention;
        FeedForwardScratch& feed_forward;
    };
    // Computes one row per token at positions position() …: the token after the row's own, and the hidden state [n][width] of the
    // row. Returns float32 [n][width] for the head, normed. Nothing counts as appended before commit().
    float* step(MoEContext& context, const Shared& shared, const RoutingOptions& options, std::span<const int32_t> tokens_next,
                const float* hidden);
    void commit(int64_t rows);
    void rewind_to(int64_t position) { position_ = position; }

    int64_t position() const { return position_; }
    std::span<const float> hidden() const { return {kept_.data(), static_cast<size_t>(kept_rows_ * model_.width)}; }
    const Selection& selection() const { return selection_; }

    static int64_t scratch_floats_per_position(const ModelSpec& model) { return 4 * model.width; }

  private:
    const ModelSpec& model_;
    Weights enorm_, hnorm_, eh_proj_, norm_;
    std::unique_ptr<Attention> attention_;
    FeedForward feed_forward_;
    int64_t position_ = 0;
    Activations input_;
    Buffer<float> joined_;         // [n][2 * width]
    Buffer<float> stream_, kept_;  // [n][width]: of the step at work; of the last one that was committed
    int64_t kept_rows_ = 0;
    Selection selection_;
};

}  // namespace colibri
