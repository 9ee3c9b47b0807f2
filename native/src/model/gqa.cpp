// Grouped-query attention: heads / kv_heads queries read one key and value head.
//
// q_THD, k_TGD, v_TGD = x W + b, normed, clipped; q and k rotated;   row of the cache = (k_TGD, v_TGD)
// score_HTS = (q_THD . k_SGD) * scale;   out_THD = sum_S softmax(score)_HTS v_SGD, in position order
#include <algorithm>
#include <cstring>

#include "attention.h"

namespace colibri {

GqaAttention::GqaAttention(const ModelSpec& model, int64_t layer, int64_t context, const std::vector<std::string>& files)
    : Attention(model, layer, context, files), gqa_(model.attention.gqa()), group_(spec_.heads / gqa_.kv_heads) {
    q_.matrix = load("attn.q", Resident::rows16, files);
    k_.matrix = load("attn.k", Resident::rows16, files);
    v_.matrix = load("attn.v", Resident::rows16, files);
    if (gqa_.qkv_bias) {
        q_.bias = load("attn.q_bias", Resident::f32, files);
        k_.bias = load("attn.k_bias", Resident::f32, files);
        v_.bias = load("attn.v_bias", Resident::f32, files);
    }
    if (gqa_.qk_norm != QkNorm::none) {
        q_.norm = load("attn.q_norm", Resident::f32, files);
        k_.norm = load("attn.k_norm", Resident::f32, files);
    }
}

// Bias, norm and clip of all heads of one position.
void GqaAttention::finish(const Kernels& kernels, const Projection& part, int64_t heads, float* x) const {
    const int64_t dim = gqa_.head_dim, width = heads * dim;
    if (!part.bias.empty()) kernels.axpy(1.0f, part.bias.f32(), width, x);
    if (!part.norm.empty()) {
        const int64_t normed = gqa_.qk_norm == QkNorm::head ? dim : width;
        for (int64_t i = 0; i < width; i += normed) kernels.rms_norm(x + i, part.norm.f32(), model_.rms_eps, normed, x + i);
    }
    // std::clamp keeps a NaN, which the next quantiser refuses.
    if (gqa_.clip != 0.0f)
        for (int64_t i = 0; i < width; ++i) x[i] = std::clamp(x[i], -gqa_.clip, gqa_.clip);
}

void GqaAttention::project(Products& products, const Rope& rope, AttentionScratch& s, int64_t n, int64_t start) {
    const Kernels& kernels = products.kernels();
    const int64_t dim = gqa_.head_dim, q_width = spec_.heads * dim, kv_width = gqa_.kv_heads * dim;
    float* rows = cache_.data() + start * cache_width_;
    s.queries.reserve(n * q_width);
    products.multiply(q_.matrix.view(), s.input, s.queries.data(), q_width);
    products.multiply(k_.matrix.view(), s.input, rows, cache_width_);
    products.multiply(v_.matrix.view(), s.input, rows + kv_width, cache_width_);

    std::vector<float> rotated(spec_.rope.dim);
    for (int64_t p = 0; p < n; ++p) {
        float* q = s.queries.data() + p * q_width;
        float* k = rows + p * cache_width_;
        finish(kernels, q_, spec_.heads, q);
        finish(kernels, k_, gqa_.kv_heads, k);
        finish(kernels, v_, gqa_.kv_heads, k + kv_width);
        for (int64_t h = 0; h < spec_.heads; ++h) rope.rotate(start + p, q + h * dim, rotated.data());
        for (int64_t g = 0; g < gqa_.kv_heads; ++g) rope.rotate(start + p, k + g * dim, rotated.data());
    }
}

void GqaAttention::mix(Products& products, AttentionScratch& s, int64_t n, int64_t start) const {
    const int64_t heads = spec_.heads;
    const int64_t work = heads * 2 * n * (start + n) * gqa_.head_dim;
    // A thread's query heads are taken key head by key head, so that a cached row is read once for all that share it.
    products.pool().parallel_for(heads, work, [&](int64_t begin, int64_t end, int thread) {
        while (begin < end) {
            const int64_t kv_head = begin / group_, last = std::min(end, (kv_head + 1) * group_);
            mix_heads(products.kernels(), s, s.per_thread[thread].scores, kv_head, begin, last, n, start);
            begin = last;
        }
    });
}

void GqaAttention::mix_heads(const Kernels& kernels, AttentionScratch& s, Buffer<float>& scores, int64_t kv_head, int64_t begin,
                             int64_t end, int64_t n, int64_t start) const {
    const int64_t dim = gqa_.head_dim, heads = end - begin, longest = start + n;
    const float* keys = cache_.data() + kv_head * dim;
    const float* values = keys + gqa_.kv_heads * dim;
    scores.reserve(group_ * longest);
    for (int64_t p = 0; p < n; ++p) {
        const float* q = s.queries.data() + (p * spec_.heads + begin) * dim;
        float* out = s.mixed.data() + (p * spec_.heads + begin) * dim;
        const int64_t count = start + p + 1;
        for (int64_t j = 0; j < count; ++j)
            for (int64_t h = 0; h < heads; ++h)
                scores[h * longest + j] = kernels.dot(q + h * dim, keys + j * cache_width_, dim) * spec_.scale;
        for (int64_t h = 0; h < heads; ++h) kernels.softmax(scores.data() + h * longest, count);
        std::memset(out, 0, heads * dim * sizeof(float));
        for (int64_t j = 0; j < count; ++j)
            for (int64_t h = 0; h < heads; ++h)
                kernels.axpy(scores[h * longest + j], values + j * cache_width_, dim, out + h * dim);
    }
}

}  // namespace colibri
