// What both kinds of attention share: norm, output projection, residual, and the sizes of their working memory.
#include "attention.h"

#include <algorithm>

namespace colibri {

std::unique_ptr<Attention> Attention::make(const ModelSpec& model, int64_t layer, int64_t context,
                                           const std::vector<std::string>& files) {
    if (model.attention.is_mla()) return std::make_unique<MlaAttention>(model, layer, context, files);
    return std::make_unique<GqaAttention>(model, layer, context, files);
}

Attention::Attention(const ModelSpec& model, int64_t layer, int64_t context, const std::vector<std::string>& files)
    : model_(model), spec_(model.attention), layer_(layer), cache_width_(spec_.cache_width()), cache_(context * cache_width_) {
    norm_ = load("attn_norm", Resident::f32, files);
    o_ = load("attn.o", Resident::rows16, files);
}

Weights Attention::load(const char* name, Resident form, const std::vector<std::string>& files) const {
    const std::string role = "layers." + std::to_string(layer_) + "." + name;
    return Weights(role, model_.tensors.at(role), form, files);
}

int64_t Attention::scratch_floats_per_position(const ModelSpec& m) {
    const AttentionSpec& spec = m.attention;
    const int64_t shared = m.width + spec.mixed_width();
    if (!spec.is_mla()) return shared + spec.heads * spec.gqa().head_dim;
    const MlaSpec& mla = spec.mla();
    int64_t index = 0;
    if (m.indexer.heads)
        index = m.indexer.heads * (m.indexer.dim + 1) + m.indexer.topk + static_cast<int64_t>(sizeof(Attended::value_type) / 4);
    return shared + mla.q_rank + spec.heads * (mla.nope + spec.rope.dim) + spec.cache_width() + index;
}

int64_t Attention::scratch_floats_per_thread(const ModelSpec& m, int64_t context) {
    const AttentionSpec& spec = m.attention;
    if (!spec.is_mla()) return spec.heads / spec.gqa().kv_heads * context;
    const MlaSpec& mla = spec.mla();
    const int64_t mixing = (mla.nope + 1 + kMixedTogether) * mla.kv_rank + spec.cache_width() + context;
    if (!m.indexer.heads) return mixing;
    // Scores and order of the candidates, a head's values and one query; a row of wq_b or wk beside them.
    return mixing + 2 * context + m.indexer.heads + std::max(m.indexer.dim, spec.rope.dim) + std::max(m.width, mla.q_rank);
}

void Attention::step(Products& products, const Rope& rope, AttentionScratch& s, float* hidden, int64_t n, int64_t start) {
    const Kernels& kernels = products.kernels();
    const int64_t width = model_.width;
    s.normed.reserve(n * width);
    for (int64_t p = 0; p < n; ++p)
        kernels.rms_norm(hidden + p * width, norm_.f32(), model_.rms_eps, width, s.normed.data() + p * width);
    s.input.set(s.normed.data(), n, width, "attention input");
    project(products, rope, s, n, start);
    s.mixed.reserve(n * spec_.mixed_width());
    mix(products, s, n, start);
    s.output_input.set(s.mixed.data(), n, spec_.mixed_width(), "attention output");
    products.multiply(o_.view(), s.output_input, s.normed.data(), width);
    for (int64_t p = 0; p < n; ++p) kernels.axpy(1.0f, s.normed.data() + p * width, width, hidden + p * width);
}

}  // namespace colibri
