// Multi-head latent attention, absorbed: scores and values are formed in the latent space, so the cache is never expanded.
//
// q_T(H,N+R) = norm(x W_qa) W_qb;   latent_SC, key_SR = split(x W_kva)
// score_HTS = ((q_THN W_kb_HNC) . latent_SC + rope(q)_THR . key_SR) * (N + R)^-1/2
// out_THV = (softmax(score)_HTS latent_SC) W_vb_HVC
// The absorbed form serves every step length, so a position's result does not depend on the length.
#include "attention.h"

#include <cmath>
#include <cstring>

namespace colibri {

namespace {

Weights load(const ModelSpec& model, int64_t layer, const char* name, Resident form, const std::vector<std::string>& files) {
    const std::string role = "layers." + std::to_string(layer) + "." + name;
    return Weights(role, model.tensors.at(role), form, files);
}

}  // namespace

Rope::Rope(double theta, int64_t dim, int64_t positions) : half_(dim / 2), cos_(positions * half_), sin_(positions * half_) {
    for (int64_t i = 0; i < half_; ++i) {
        const double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
        for (int64_t p = 0; p < positions; ++p) {
            const double angle = static_cast<double>(p) * frequency;
            cos_[p * half_ + i] = static_cast<float>(std::cos(angle));
            sin_[p * half_ + i] = static_cast<float>(std::sin(angle));
        }
    }
}

void Rope::rotate(int64_t position, float* x, float* scratch) const {
    const float* cos = cos_.data() + position * half_;
    const float* sin = sin_.data() + position * half_;
    for (int64_t i = 0; i < half_; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        scratch[i] = a * cos[i] - b * sin[i];
        scratch[half_ + i] = b * cos[i] + a * sin[i];
    }
    std::memcpy(x, scratch, 2 * half_ * sizeof(float));
}

Attention::Attention(const ModelSpec& model, int64_t layer, int64_t context, const std::vector<std::string>& files)
    : model_(model),
      qk_(model.nope + model.rope),
      cache_width_(model.kv_rank + model.rope),
      scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(qk_)))),
      norm_(load(model, layer, "attn_norm", Resident::f32, files)),
      q_a_(load(model, layer, "attn.q_a", Resident::rows16, files)),
      q_a_norm_(load(model, layer, "attn.q_a_norm", Resident::f32, files)),
      q_b_(load(model, layer, "attn.q_b", Resident::rows16, files)),
      kv_a_(load(model, layer, "attn.kv_a", Resident::rows16, files)),
      kv_a_norm_(load(model, layer, "attn.kv_a_norm", Resident::f32, files)),
      kv_b_(load(model, layer, "attn.kv_b", Resident::row_major, files)),
      o_(load(model, layer, "attn.o", Resident::rows16, files)),
      cache_(context * cache_width_) {
    if (model.indexer.heads && model.indexer.full[layer]) indexer_ = std::make_unique<Indexer>(model, layer, context, files);
}

int64_t Attention::scratch_floats_per_position(const ModelSpec& m) {
    const int64_t qk = m.nope + m.rope;
    const int64_t index =
        m.indexer.heads * (m.indexer.dim + 1) + m.indexer.topk + static_cast<int64_t>(sizeof(Attended::value_type) / 4);
    return m.width + m.q_rank + m.heads * qk + m.kv_rank + m.rope + m.heads * m.value + index;
}

void Attention::project(Products& products, const Rope& rope, AttentionScratch& s, const float* hidden, int64_t n, int64_t start) {
    const Kernels& kernels = products.kernels();
    const int64_t width = model_.width, q_rank = model_.q_rank, latent = model_.kv_rank, heads = model_.heads;
    s.normed.reserve(n * width);
    s.q_latent.reserve(n * q_rank);
    s.queries.reserve(n * heads * qk_);
    s.kv.reserve(n * cache_width_);

    for (int64_t p = 0; p < n; ++p)
        kernels.rms_norm(hidden + p * width, norm_.f32(), model_.rms_eps, width, s.normed.data() + p * width);
    s.input.set(s.normed.data(), n, width, "attention input");
    products.multiply(q_a_.view(), s.input, s.q_latent.data(), q_rank);
    products.multiply(kv_a_.view(), s.input, s.kv.data(), cache_width_);

    std::vector<float> rotated(model_.rope);
    for (int64_t p = 0; p < n; ++p) {
        float* row = cache_.data() + (start + p) * cache_width_;
        const float* kv = s.kv.data() + p * cache_width_;
        kernels.rms_norm(kv, kv_a_norm_.f32(), model_.latent_eps, latent, row);
        std::memcpy(row + latent, kv + latent, model_.rope * sizeof(float));
        rope.rotate(start + p, row + latent, rotated.data());
        float* q = s.q_latent.data() + p * q_rank;
        kernels.rms_norm(q, q_a_norm_.f32(), model_.latent_eps, q_rank, q);
    }
    s.q_latent_input.set(s.q_latent.data(), n, q_rank, "query latent");
    products.multiply(q_b_.view(), s.q_latent_input, s.queries.data(), heads * qk_);
    for (int64_t p = 0; p < n; ++p)
        for (int64_t h = 0; h < heads; ++h)
            rope.rotate(start + p, s.queries.data() + (p * heads + h) * qk_ + model_.nope, rotated.data());
}

void Attention::attend_head(const Kernels& kernels, AttentionScratch& s, AttentionScratch::PerThread& mine, int64_t head, int64_t n,
                            int64_t start) const {
    const int64_t latent = model_.kv_rank, nope = model_.nope, value = model_.value, heads = model_.heads;
    mine.head_weights.reserve((nope + value) * latent);
    mine.query.reserve(cache_width_);
    mine.context.reserve(latent);
    mine.scores.reserve(start + n);
    for (int64_t r = 0; r < nope + value; ++r) kv_b_.row(kernels, head * (nope + value) + r, mine.head_weights.data() + r * latent);
    const float* key_rows = mine.head_weights.data();
    const float* value_rows = key_rows + nope * latent;

    for (int64_t p = 0; p < n; ++p) {
        const float* q = s.queries.data() + (p * heads + head) * qk_;
        kernels.dot_columns(key_rows, latent, nope, latent, q, mine.query.data());
        std::memcpy(mine.query.data() + latent, q + nope, model_.rope * sizeof(float));

        const std::vector<int32_t>* chosen = s.attended.empty() || s.attended[p].empty() ? nullptr : &s.attended[p];
        const int64_t count = chosen ? static_cast<int64_t>(chosen->size()) : start + p + 1;
        const auto cached = [&](int64_t j) { return cache_.data() + (chosen ? (*chosen)[j] : j) * cache_width_; };
        for (int64_t j = 0; j < count; ++j) mine.scores[j] = kernels.dot(mine.query.data(), cached(j), cache_width_) * scale_;
        kernels.softmax(mine.scores.data(), count);
        std::memset(mine.context.data(), 0, latent * sizeof(float));
        for (int64_t j = 0; j < count; ++j) kernels.axpy(mine.scores[j], cached(j), latent, mine.context.data());
        float* out = s.attended_values.data() + (p * heads + head) * value;
        for (int64_t v = 0; v < value; ++v) out[v] = kernels.dot(value_rows + v * latent, mine.context.data(), latent);
    }
}

void Attention::step(Products& products, const Rope& rope, AttentionScratch& s, float* hidden, int64_t n, int64_t start) {
    const int64_t width = model_.width, heads = model_.heads, value = model_.value;
    project(products, rope, s, hidden, n, start);
    if (indexer_) indexer_->step(products, rope, s, n, start);

    s.attended_values.reserve(n * heads * value);
    const int64_t per_head = (model_.nope + value) * model_.kv_rank * (1 + n) + 2 * n * (start + n) * cache_width_;
    products.pool().parallel_for(heads, heads * per_head, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t head = begin; head < end; ++head) attend_head(products.kernels(), s, s.per_thread[thread], head, n, start);
    });

    s.output_input.set(s.attended_values.data(), n, heads * value, "attention output");
    products.multiply(o_.view(), s.output_input, s.normed.data(), width);
    for (int64_t p = 0; p < n; ++p) products.kernels().axpy(1.0f, s.normed.data() + p * width, width, hidden + p * width);
}

}  // namespace colibri
