// Domains of a model's dimensions.
#include "check_spec.h"

#include <algorithm>
#include <string>

#include "colibri/error.h"

namespace colibri {
namespace {

constexpr int64_t kLargest = int64_t{1} << 30;

void within(const char* name, int64_t value, int64_t least, int64_t most = kLargest) {
    if (value < least || value > most)
        throw Error("OptionError", "size outside its domain", name, std::to_string(least) + " … " + std::to_string(most),
                    std::to_string(value));
}

void length(const char* name, size_t found, int64_t expected) {
    if (found != static_cast<size_t>(expected))
        throw Error("OptionError", "list of the wrong length", name, std::to_string(expected), std::to_string(found));
}

void check_attention(const AttentionSpec& spec) {
    within("heads", spec.heads, 1, 1 << 16);
    within("rope dimension", spec.rope.dim, 2, 1 << 16);
    if (spec.rope.dim % 2)
        throw Error("OptionError", "rope rotates pairs", "rope dimension", "an even number", std::to_string(spec.rope.dim));
    if (spec.is_mla()) {
        within("q_rank", spec.mla().q_rank, 1);
        within("kv_rank", spec.mla().kv_rank, 1);
        within("nope", spec.mla().nope, 1, 1 << 16);
        within("value", spec.mla().value, 1, 1 << 16);
        return;
    }
    within("kv_heads", spec.gqa().kv_heads, 1, spec.heads);
    within("head_dim", spec.gqa().head_dim, spec.rope.dim, 1 << 16);
    if (spec.heads % spec.gqa().kv_heads)
        throw Error("OptionError", "queries share keys evenly", "kv_heads", "a divisor of " + std::to_string(spec.heads),
                    std::to_string(spec.gqa().kv_heads));
}

}  // namespace

void check_budgets(const ModelSpec& m, const std::vector<int64_t>& budgets) { length("budgets", budgets.size(), m.store_layers()); }

int64_t ModelSpec::moe_layers() const { return std::count(sparse.begin(), sparse.end(), true); }
int64_t ModelSpec::store_layers() const { return moe_layers() + mtp; }

void check_spec(const ModelSpec& m, const EngineOptions& o) {
    within("vocab", m.vocab, 1);
    within("width", m.width, 1);
    within("layers", m.layers, 1, 1 << 20);
    within("dense_hidden", m.dense_hidden, 1);
    length("sparse", m.sparse.size(), m.layers);
    check_attention(m.attention);
    within("indexer heads", m.indexer.heads, 0, m.attention.is_mla() ? 1 << 16 : 0);
    if (m.indexer.heads) {
        within("indexer dimension", m.indexer.dim, m.attention.rope.dim, 1 << 16);
        within("indexer topk", m.indexer.topk, 1, kLargest);
        length("indexer kinds", m.indexer.full.size(), m.layers);
        if (!m.indexer.full[0])
            throw Error("OptionError", "the first layer has no earlier choice to share", "indexer kinds", "full", "shared");
    }
    if (m.store_layers()) {
        within("experts", m.experts, 1, 1 << 20);
        within("expert_hidden", m.expert_hidden, 1);
        within("shared_hidden", m.shared_hidden, 0);
        within("top_k", m.router.top_k, 1, m.experts);
        within("n_group", m.router.n_group, 1, m.experts);
        within("topk_group", m.router.topk_group, 1, m.router.n_group);
        length("experts of layers", o.store.experts.size(), m.store_layers());
        for (const auto& layer : o.store.experts) length("experts of a layer", layer.size(), m.experts);
    }
    check_budgets(m, o.budgets);
    within("context", o.context, 1);
    within("threads", o.threads, 1, 1 << 12);
}

}  // namespace colibri
