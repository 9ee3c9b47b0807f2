// AVX-512 VNNI kernels: quantised activations and the integer products with rows16 weights. Each equals
// kernels/scalar/quantized.cpp bit for bit: lanes are rows, so a row's groups are added in order.
#define COLIBRI_ISA avx512
#include "../parts.h"
#include "lanes.h"
#include "scales.h"

namespace colibri::avx512 {

namespace {

constexpr int64_t kPrefetchBytes = 4608;  // how far ahead of the product the weights are fetched

inline __m512i load512(const uint8_t* bytes) { return _mm512_loadu_si512(bytes); }

inline void prefetch(const uint8_t* address) { _mm_prefetch(reinterpret_cast<const char*>(address) + kPrefetchBytes, _MM_HINT_T0); }

// Four activations in every lane.
inline __m512i broadcast(const int8_t* q) {
    int32_t four;
    __builtin_memcpy(&four, q, sizeof four);
    return _mm512_set1_epi32(four);
}

// acc + float(isum) * (scale_w * scale_x): a multiply and an add.
inline __m512 add_group(__m512 acc, __m512i isum, __m512 scale_w, float scale_x) {
    return _mm512_add_ps(acc, _mm512_mul_ps(_mm512_cvtepi32_ps(isum), _mm512_mul_ps(scale_w, _mm512_set1_ps(scale_x))));
}

// One row block times positions [p, p + P).
template <typename Scales, int P>
void int4_block(const uint8_t* block, const QuantizedActivations& x, int64_t p, int64_t rows, float* y, int64_t y_stride) {
    const int64_t vectors = x.group / 8;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 acc[P];
    for (int i = 0; i < P; ++i) acc[i] = _mm512_setzero_ps();
    for (int64_t g = 0; g < x.groups; ++g) {
        const int8_t* q[P];
        // Two sums each: with few positions a chain of additions to one would take longer than memory does.
        __m512i isum[P], more[P];
        for (int i = 0; i < P; ++i) {
            q[i] = x.q + ((p + i) * x.groups + g) * x.group;
            isum[i] = _mm512_set1_epi32(-8 * x.sums[(p + i) * x.groups + g]);
            more[i] = _mm512_setzero_si512();
        }
        for (int64_t t = 0; t < vectors; ++t) {
            prefetch(block + 64 * t);
            const __m512i pair = load512(block + 64 * t);
            const __m512i low = _mm512_and_si512(pair, nibble);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(pair, 4), nibble);
            for (int i = 0; i < P; ++i) {
                isum[i] = _mm512_dpbusd_epi32(isum[i], low, broadcast(q[i] + 8 * t));
                more[i] = _mm512_dpbusd_epi32(more[i], high, broadcast(q[i] + 8 * t + 4));
            }
        }
        block += 64 * vectors;
        prefetch(block);
        const __m512 scale_w = Scales::all(block);
        block += Scales::bytes * kRowBlock;
        for (int i = 0; i < P; ++i)
            acc[i] = add_group(acc[i], _mm512_add_epi32(isum[i], more[i]), scale_w, x.scales[(p + i) * x.groups + g]);
    }
    for (int i = 0; i < P; ++i) store(y + (p + i) * y_stride, rows, acc[i]);
}

template <int P>
void int8_block(const uint8_t* block, const QuantizedActivations& x, int64_t p, int64_t rows, float* y, int64_t y_stride) {
    const int64_t vectors = x.group / 4;
    const __m512 scale_w = F32Scales::all(block);
    block += 4 * kRowBlock;
    __m512 acc[P];
    for (int i = 0; i < P; ++i) acc[i] = _mm512_setzero_ps();
    for (int64_t g = 0; g < x.groups; ++g) {
        const int8_t* q[P];
        __m512i isum[P];
        for (int i = 0; i < P; ++i) {
            q[i] = x.q + ((p + i) * x.groups + g) * x.group;
            isum[i] = _mm512_set1_epi32(-128 * x.sums[(p + i) * x.groups + g]);
        }
        for (int64_t t = 0; t < vectors; ++t) {
            prefetch(block + 64 * t);
            const __m512i weights = load512(block + 64 * t);
            for (int i = 0; i < P; ++i) isum[i] = _mm512_dpbusd_epi32(isum[i], weights, broadcast(q[i] + 4 * t));
        }
        block += 64 * vectors;
        for (int i = 0; i < P; ++i) acc[i] = add_group(acc[i], isum[i], scale_w, x.scales[(p + i) * x.groups + g]);
    }
    for (int i = 0; i < P; ++i) store(y + (p + i) * y_stride, rows, acc[i]);
}

using BlockKernel = void (*)(const uint8_t*, const QuantizedActivations&, int64_t, int64_t, float*, int64_t);

// Positions 8, 4, 2, 1 at a time over each block, so that its weights are read from memory once.
void matmul(const BlockKernel (&kernels)[4], const uint8_t* w, int64_t block_bytes, int64_t rows, int64_t block_begin,
            int64_t block_end, const QuantizedActivations& x, float* y, int64_t y_stride) {
    for (int64_t b = block_begin; b < block_end; ++b) {
        int64_t p = 0;
        for (int k = 3; k >= 0; --k) {
            for (const int64_t step = int64_t{1} << k; p + step <= x.n; p += step) {
                kernels[k](w + b * block_bytes, x, p, rows - b * kRowBlock, y + b * kRowBlock, y_stride);
            }
        }
    }
}

template <typename Scales>
void int4_product(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                  int64_t y_stride) {
    static constexpr BlockKernel kernels[4] = {int4_block<Scales, 1>, int4_block<Scales, 2>, int4_block<Scales, 4>,
                                               int4_block<Scales, 8>};
    matmul(kernels, w, x.groups * int4_record_bytes(x.group, Scales::bytes), rows, block_begin, block_end, x, y, y_stride);
}

}  // namespace

int64_t quantize(const float* x, int64_t cols, int64_t group, int8_t* q, float* scales, int32_t* sums) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t begin = 0, g = 0; begin < cols; begin += group, ++g) {
        const int64_t count = cols - begin < group ? cols - begin : group;
        // Magnitudes compare as integers, and everything from infinity's pattern up is not finite.
        __m512i most = _mm512_setzero_si512();
        for (int64_t i = 0; i < count; i += 16) {
            const __m512i bits = _mm512_and_si512(_mm512_castps_si512(load(x + begin + i, count - i)), magnitude);
            const __mmask16 bad = _mm512_cmpge_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
            if (bad != 0) return begin + i + __builtin_ctz(bad);
            most = _mm512_max_epi32(most, bits);
        }
        const float largest = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(most))));
        const bool zero = largest < 1e-30f;
        const float scale = zero ? 0.0f : largest / 127.0f;
        const __m512 divisor = _mm512_set1_ps(zero ? __builtin_inff() : scale);  // x / infinity rounds to 0
        __m512i sum = _mm512_setzero_si512();
        for (int64_t i = 0; i < group; i += 16) {
            const __m512 quotient = _mm512_div_ps(load(x + begin + i, count - i), divisor);
            const __m512 clipped = _mm512_min_ps(_mm512_max_ps(quotient, _mm512_set1_ps(-127.0f)), _mm512_set1_ps(127.0f));
            const __m512i rounded = _mm512_cvtps_epi32(clipped);  // ties to even
            sum = _mm512_add_epi32(sum, rounded);
            _mm512_mask_cvtepi32_storeu_epi8(q + begin + i, lanes_below(group - i), rounded);
        }
        scales[g] = scale;
        sums[g] = _mm512_reduce_add_epi32(sum);
    }
    return -1;
}

void matmul_int4(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                 int64_t y_stride) {
    int4_product<F32Scales>(w, rows, block_begin, block_end, x, y, y_stride);
}

void matmul_int4_f16(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x,
                     float* y, int64_t y_stride) {
    int4_product<F16Scales>(w, rows, block_begin, block_end, x, y, y_stride);
}

void matmul_int8(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                 int64_t y_stride) {
    static constexpr BlockKernel kernels[4] = {int8_block<1>, int8_block<2>, int8_block<4>, int8_block<8>};
    matmul(kernels, w, int8_block_bytes(x.groups), rows, block_begin, block_end, x, y, y_stride);
}

}  // namespace colibri::avx512
