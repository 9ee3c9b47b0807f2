// The native engine: one forward call per step over weights in memory and experts on disk.
//
// One thread at a time calls into an Engine; its own threads compute and read. Nothing here touches Python.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "colibri/expert_store.h"
#include "colibri/routing.h"

namespace colibri {

// Frequencies stretched beyond the context of training, YaRN §3.
struct YarnSpec {
    double factor = 0;  // 0: plain frequencies
    double original_positions = 0, beta_fast = 0, beta_slow = 0;
    bool truncate = true;
};

struct RopeSpec {
    int64_t dim = 0;  // elements that rotate; even
    double theta = 10000.0;
    bool interleaved = true;  // pairs (2i, 2i + 1); else (i, i + dim / 2)
    YarnSpec yarn;
    double attention_factor = 1.0;  // on cos and sin
};

// Multi-head latent attention.
struct MlaSpec {
    int64_t q_rank = 0, kv_rank = 0, nope = 0, value = 0;
    float latent_eps = 0;
};

enum class QkNorm { none, head, width };

// Grouped-query attention; the order of its parts is that of colibri_jax.config.GQAConfig.
struct GqaSpec {
    int64_t kv_heads = 0, head_dim = 0;
    bool qkv_bias = false;
    QkNorm qk_norm = QkNorm::none;
    float clip = 0;  // 0: none
};

struct AttentionSpec {
    std::variant<MlaSpec, GqaSpec> kind;
    int64_t heads = 0;
    float scale = 0;  // on the scores
    RopeSpec rope;

    const MlaSpec& mla() const { return std::get<MlaSpec>(kind); }
    const GqaSpec& gqa() const { return std::get<GqaSpec>(kind); }
    bool is_mla() const { return std::holds_alternative<MlaSpec>(kind); }
    // Of the KV cache per position: latent and rotated key, or rotated keys and values.
    int64_t cache_width() const { return is_mla() ? mla().kv_rank + rope.dim : 2 * gqa().kv_heads * gqa().head_dim; }
    // Of all heads' mixes, the output projection's input.
    int64_t mixed_width() const { return heads * (is_mla() ? mla().value : gqa().head_dim); }
};

struct IndexerSpec {
    int64_t heads = 0;  // 0: attention is dense
    int64_t dim = 0;
    int64_t topk = 0;
    float eps = 0;
    std::vector<bool> full;  // per trunk layer; false reuses the choice of the previous full layer

    // Whether a layer chooses by itself; the MTP block's, which comes after the trunk's, does.
    bool chooses(int64_t layer) const {
        return heads && (layer >= static_cast<int64_t>(full.size()) || full[static_cast<size_t>(layer)]);
    }
};

// The model as colibri_jax.config.ModelConfig describes it, and where its tensors lie.
struct ModelSpec {
    int64_t vocab = 0, width = 0, layers = 0, dense_hidden = 0;
    std::vector<bool> sparse;  // per layer
    float rms_eps = 0;
    AttentionSpec attention;
    IndexerSpec indexer;  // only with MLA
    int64_t experts = 0, expert_hidden = 0, shared_hidden = 0;
    RouterSpec router;  // bias empty: it is a tensor of each layer
    bool tied = false;
    bool mtp = false;  // an MTP block follows the trunk: layer `layers`, and the store's last layer
    std::map<std::string, StoredMatrix>
        tensors;  // by role (colibri_jax/tensors.py), of all that is loaded, without routed experts; bits 32: float32

    int64_t moe_layers() const;    // of the trunk
    int64_t store_layers() const;  // with the MTP block's
};

struct EngineOptions {
    StoreOptions store;
    int64_t context = 0;                // positions that the KV cache holds
    int threads = 1;                    // compute threads, the caller's included
    std::string isa;                    // "" takes the best
    bool quantised_activations = true;  // false: float32 activations (precision "w4a32")
    int64_t step_bytes = 0;             // working memory and logits that a step may take; 0: no bound
    RoutingOptions routing;             // TOPK and TOPP act always, the rest where a step says so
    std::vector<int64_t> budgets;       // one per layer of the store, 0 off
};

enum class Phase { disk_wait, experts, attention, head, other };
constexpr int kPhases = 5;

// What one step did.
struct StepReport {
    double wall_seconds = 0;
    std::array<double, kPhases> phase_seconds{};
    StoreCounters store;  // of this step alone
    uint64_t avoided_read_bytes_estimate = 0;
};

// The input of one quantiser: `rows` are the step's positions that `values` [rows][cols] belong to.
struct TracedInput {
    int64_t layer = 0;
    std::string what;
    int64_t cols = 0;
    std::vector<int32_t> rows;
    std::vector<float> values;
};

// What the comparison tool looks at; filled when tracing is on.
struct Trace {
    std::vector<TracedInput> inputs;                // in the order of computation, layers only
    std::vector<std::vector<float>> hidden;         // [layers + 1][n * width]: input of each layer, then of the final norm
    std::vector<std::vector<float>> router_logits;  // [MoE layers][n * experts]
    std::vector<std::vector<std::vector<int32_t>>>
        attended;  // [layers][n]: positions attended where the indexer limited them, else empty
};

struct MemoryPlan {
    int64_t dense_bytes = 0;              // weights that stay in memory
    int64_t kv_cache_bytes = 0;           // keys and values, indexer keys; the MTP block's too
    int64_t store_bytes = 0;              // expert slots and staging buffers
    int64_t step_bytes_per_position = 0;  // working memory of a step, without logits
    int64_t fixed_bytes = 0;              // working memory whatever the step
};

class Engine {
  public:
    // Reads the dense weights. Throws Error of the classes that colibri_jax/errors.py names.
    Engine(ModelSpec model, EngineOptions options);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    static MemoryPlan memory_plan(const ModelSpec& model, const EngineOptions& options);

    // Appends `tokens` and writes float32 logits [n or 1][vocab] (`last_only`). With `rows_alone` every row has the experts that it
    // would have in a step of its own (RoutingOptions::rows_alone), and so the logits that decoding it would give. `row_votes`
    // weigh the rows of a budget's votes (select_experts); empty: all alike. `interrupted` is asked between layers; when it answers
    // true the step is abandoned, nothing is appended and false is returned. An Error leaves the engine as usable; the report says
    // what the abandoned step did.
    bool forward(std::span<const int32_t> tokens, bool budget_acts, bool last_only, float* logits,
                 const std::function<bool()>& interrupted, bool rows_alone = false, std::span<const int64_t> row_votes = {});

    // Steps from now on route by these; `budgets` as in EngineOptions.
    void reroute(const RoutingOptions& routing, std::vector<int64_t> budgets);

    void rewind(int64_t positions);
    int64_t position() const;
    const std::vector<Selection>& selections() const;  // of the last step, one per MoE layer
    const StepReport& report() const;                  // of the last step or MTP step
    std::span<const float> hidden() const;             // [n][width]: the last finished step's rows after the final norm

    // The MTP block, with rows and a cache of its own; Error("ConfigError") where it was not loaded. A step appends a row for each
    // of `tokens_next`, the token after the row's own; `hidden` [n][width] is the trunk's (or, drafting on, the block's) hidden
    // state of the rows. Else as forward(); a rewind of the trunk takes the block's later rows along.
    bool mtp_forward(std::span<const int32_t> tokens_next, const float* hidden, bool budget_acts, bool last_only, float* logits,
                     const std::function<bool()>& interrupted, bool rows_alone = false);
    void mtp_rewind(int64_t rows);
    int64_t mtp_position() const;
    std::span<const float> mtp_hidden() const;  // [n][width]: the last finished MTP step's rows after the block's norm
    const Selection& mtp_selection() const;     // of the last MTP step

    // Quantiser inputs are many times the rest: none, those of all layers, or those of one (0 …).
    static constexpr int64_t kNoInputs = -2, kAllInputs = -1;
    void set_trace(bool on, int64_t inputs = kAllInputs);
    const Trace& trace() const;
    std::vector<float> kv_cache(int64_t layer) const;    // [position][cache_width]
    std::vector<float> index_keys(int64_t layer) const;  // [position][indexer dim]; empty where the layer shares

    std::string isa() const;
    const ExpertStore* store() const;  // null without MoE layers

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace colibri
