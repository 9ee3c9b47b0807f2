// Multi-head latent attention, absorbed: scores and values are formed in the latent space, so the cache is never expanded.
//
// q_T(H,N+R) = norm(x W_qa) W_qb;   latent_SC, key_SR = split(x W_kva)
// score_HTS = ((q_THN W_kb_HNC) . latent_SC + rope(q)_THR . key_SR) * scale
// out_THV = (softmax(score)_HTS latent_SC) W_vb_HVC
// The absorbed form serves every step length, so a position's result does not depend on the length.
#include <algorithm>
#include <cstring>

#include "attention.h"

namespace colibri {

MlaAttention::MlaAttention(const ModelSpec& model, int64_t layer, int64_t context, const std::vector<std::string>& files)
    : Attention(model, layer, context, files), mla_(model.attention.mla()), qk_(mla_.nope + spec_.rope.dim) {
    q_a_ = load("attn.q_a", Resident::rows16, files);
    q_a_norm_ = load("attn.q_a_norm", Resident::f32, files);
    q_b_ = load("attn.q_b", Resident::rows16, files);
    kv_a_ = load("attn.kv_a", Resident::rows16, files);
    kv_a_norm_ = load("attn.kv_a_norm", Resident::f32, files);
    kv_b_ = load("attn.kv_b", Resident::row_major, files);
    if (model.indexer.chooses(layer)) indexer_ = std::make_unique<Indexer>(model, layer, context, files);
}

void MlaAttention::project(Products& products, const Rope& rope, AttentionScratch& s, int64_t n, int64_t start) {
    const Kernels& kernels = products.kernels();
    const int64_t q_rank = mla_.q_rank, latent = mla_.kv_rank, heads = spec_.heads, rope_dim = spec_.rope.dim;
    s.q_latent.reserve(n * q_rank);
    s.queries.reserve(n * heads * qk_);
    s.kv.reserve(n * cache_width_);
    products.multiply(q_a_.view(), s.input, s.q_latent.data(), q_rank);
    products.multiply(kv_a_.view(), s.input, s.kv.data(), cache_width_);

    std::vector<float> rotated(rope_dim);
    for (int64_t p = 0; p < n; ++p) {
        float* row = cache_.data() + (start + p) * cache_width_;
        const float* kv = s.kv.data() + p * cache_width_;
        kernels.rms_norm(kv, kv_a_norm_.f32(), mla_.latent_eps, latent, row);
        std::memcpy(row + latent, kv + latent, rope_dim * sizeof(float));
        rope.rotate(start + p, row + latent, rotated.data());
        float* q = s.q_latent.data() + p * q_rank;
        kernels.rms_norm(q, q_a_norm_.f32(), mla_.latent_eps, q_rank, q);
    }
    s.q_latent_input.set(s.q_latent.data(), n, q_rank, "query latent");
    products.multiply(q_b_.view(), s.q_latent_input, s.queries.data(), heads * qk_);
    for (int64_t p = 0; p < n; ++p)
        for (int64_t h = 0; h < heads; ++h)
            rope.rotate(start + p, s.queries.data() + (p * heads + h) * qk_ + mla_.nope, rotated.data());
    if (indexer_) indexer_->step(products, rope, s, n, start);
}

void MlaAttention::mix(Products& products, AttentionScratch& s, int64_t n, int64_t start) const {
    const int64_t heads = spec_.heads;
    const int64_t per_head = (mla_.nope + mla_.value) * mla_.kv_rank * (1 + n) + 2 * n * (start + n) * cache_width_;
    products.pool().parallel_for(heads, heads * per_head, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t head = begin; head < end; ++head) mix_head(products.kernels(), s, s.per_thread[thread], head, n, start);
    });
}

void MlaAttention::mix_head(const Kernels& kernels, AttentionScratch& s, AttentionScratch::PerThread& mine, int64_t head, int64_t n,
                            int64_t start) const {
    const int64_t latent = mla_.kv_rank, nope = mla_.nope, value = mla_.value, heads = spec_.heads;
    mine.key_rows.reserve(nope * latent);
    mine.value_row.reserve(latent);
    mine.query.reserve(cache_width_);
    mine.contexts.reserve(kMixedTogether * latent);
    mine.scores.reserve(start + n);
    const int64_t first_row = head * (nope + value);
    for (int64_t r = 0; r < nope; ++r) kv_b_.row(kernels, first_row + r, mine.key_rows.data() + r * latent);

    // Rows of values are used as soon as they are dequantised, while they are in the nearest cache, for several positions.
    for (int64_t begin = 0; begin < n; begin += kMixedTogether) {
        const int64_t end = std::min(n, begin + kMixedTogether);
        for (int64_t p = begin; p < end; ++p) attend(kernels, s, mine, head, p, start, mine.contexts.data() + (p - begin) * latent);
        for (int64_t v = 0; v < value; ++v) {
            kv_b_.row(kernels, first_row + nope + v, mine.value_row.data());
            for (int64_t p = begin; p < end; ++p)
                s.mixed[(p * heads + head) * value + v] =
                    kernels.dot(mine.value_row.data(), mine.contexts.data() + (p - begin) * latent, latent);
        }
    }
}

// The latent rows that one position of one head attends to, weighted and summed.
void MlaAttention::attend(const Kernels& kernels, const AttentionScratch& s, AttentionScratch::PerThread& mine, int64_t head,
                          int64_t p, int64_t start, float* context) const {
    const int64_t latent = mla_.kv_rank, nope = mla_.nope;
    const float* q = s.queries.data() + (p * spec_.heads + head) * qk_;
    kernels.dot_columns(mine.key_rows.data(), latent, nope, latent, q, mine.query.data());
    std::memcpy(mine.query.data() + latent, q + nope, spec_.rope.dim * sizeof(float));

    const std::vector<int32_t>* chosen = s.attended.empty() || s.attended[p].empty() ? nullptr : &s.attended[p];
    const int64_t count = chosen ? static_cast<int64_t>(chosen->size()) : start + p + 1;
    const auto cached = [&](int64_t j) { return cache_.data() + (chosen ? (*chosen)[j] : j) * cache_width_; };
    for (int64_t j = 0; j < count; ++j) mine.scores[j] = kernels.dot(mine.query.data(), cached(j), cache_width_) * spec_.scale;
    kernels.softmax(mine.scores.data(), count);
    std::memset(context, 0, latent * sizeof(float));
    for (int64_t j = 0; j < count; ++j) kernels.axpy(mine.scores[j], cached(j), latent, context);
}

}  // namespace colibri
