// AVX2 kernels: quantised activations and the integer products with rows16 weights. Each equals kernels/scalar/quantized.cpp
// bit for bit: lanes are rows, so a row's groups are added in order.
#define COLIBRI_ISA avx2
#include "../parts.h"
#include "lanes.h"
#include "scales.h"

namespace colibri::avx2 {

namespace {

constexpr int64_t kPrefetchBytes = 4608;  // how far ahead of the product the weights are fetched

inline __m256i load256(const void* bytes) { return _mm256_loadu_si256(static_cast<const __m256i*>(bytes)); }

inline int32_t load32(const void* bytes) {
    int32_t value;
    __builtin_memcpy(&value, bytes, sizeof value);
    return value;
}

inline void prefetch(const uint8_t* address) { _mm_prefetch(reinterpret_cast<const char*>(address) + kPrefetchBytes, _MM_HINT_T0); }

// acc + float(isum) * (scale_w * scale_x): a multiply and an add.
inline __m256 add_group(__m256 acc, __m256i isum, __m256 scale_w, float scale_x) {
    return _mm256_add_ps(acc, _mm256_mul_ps(_mm256_cvtepi32_ps(isum), _mm256_mul_ps(scale_w, _mm256_set1_ps(scale_x))));
}

inline void store_rows(float* y, __m256 low, __m256 high, int64_t rows) {
    store(y, rows, low);
    store(y + 8, rows - 8, high);
}

// One row block times positions [p, p + P).
template <typename Scales, int P>
void int4_block(const uint8_t* block, const QuantizedActivations& x, int64_t p, int64_t rows, float* y, int64_t y_stride) {
    const int64_t vectors = x.group / 8;
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256 acc[P][2];
    for (int i = 0; i < P; ++i) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < x.groups; ++g) {
        const int8_t* q[P];
        __m256i isum[P][2];
        for (int i = 0; i < P; ++i) {
            q[i] = x.q + ((p + i) * x.groups + g) * x.group;
            isum[i][0] = isum[i][1] = _mm256_set1_epi32(-8 * x.sums[(p + i) * x.groups + g]);
        }
        for (int64_t begin = 0; begin < vectors; begin += 4) {
            // Four vectors fit in 16 bits: 8 products of pairs, each at most 15 * 128 * 2.
            const int64_t end = begin + 4 < vectors ? begin + 4 : vectors;
            __m256i sum16[P][2];
            for (int i = 0; i < P; ++i) sum16[i][0] = sum16[i][1] = _mm256_setzero_si256();
            for (int64_t t = begin; t < end; ++t) {
                prefetch(block + 64 * t);
                for (int half = 0; half < 2; ++half) {
                    const __m256i pair = load256(block + 64 * t + 32 * half);
                    const __m256i low = _mm256_and_si256(pair, nibble);
                    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(pair, 4), nibble);
                    for (int i = 0; i < P; ++i) {
                        const __m256i first = _mm256_maddubs_epi16(low, _mm256_set1_epi32(load32(q[i] + 8 * t)));
                        const __m256i second = _mm256_maddubs_epi16(high, _mm256_set1_epi32(load32(q[i] + 8 * t + 4)));
                        sum16[i][half] = _mm256_add_epi16(sum16[i][half], _mm256_add_epi16(first, second));
                    }
                }
            }
            for (int i = 0; i < P; ++i) {
                for (int half = 0; half < 2; ++half) {
                    isum[i][half] = _mm256_add_epi32(isum[i][half], _mm256_madd_epi16(sum16[i][half], ones));
                }
            }
        }
        block += 64 * vectors;
        prefetch(block);
        const __m256 scale_low = Scales::eight(block, 0), scale_high = Scales::eight(block, 1);
        block += Scales::bytes * kRowBlock;
        for (int i = 0; i < P; ++i) {
            const float scale_x = x.scales[(p + i) * x.groups + g];
            acc[i][0] = add_group(acc[i][0], isum[i][0], scale_low, scale_x);
            acc[i][1] = add_group(acc[i][1], isum[i][1], scale_high, scale_x);
        }
    }
    for (int i = 0; i < P; ++i) store_rows(y + (p + i) * y_stride, acc[i][0], acc[i][1], rows);
}

// Bytes widen to 16 bits first: maddubs would saturate at 255 * 127 * 2.
template <int P>
void int8_block(const uint8_t* block, const QuantizedActivations& x, int64_t p, int64_t rows, float* y, int64_t y_stride) {
    const int64_t vectors = x.group / 4;
    const __m256 scale_low = F32Scales::eight(block, 0), scale_high = F32Scales::eight(block, 1);
    block += 4 * kRowBlock;
    __m256 acc[P][2];
    for (int i = 0; i < P; ++i) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < x.groups; ++g) {
        __m256i sum[P][4];  // quarter k: rows 4k ... 4k + 3, two sums of two products each
        for (int i = 0; i < P; ++i) {
            for (int quarter = 0; quarter < 4; ++quarter) sum[i][quarter] = _mm256_setzero_si256();
        }
        for (int64_t t = 0; t < vectors; ++t) {
            prefetch(block + 64 * t);
            __m256i inputs[P];
            for (int i = 0; i < P; ++i) {
                const int8_t* q = x.q + ((p + i) * x.groups + g) * x.group + 4 * t;
                inputs[i] = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(load32(q))));
            }
            for (int quarter = 0; quarter < 4; ++quarter) {
                const void* bytes = block + 64 * t + 16 * quarter;
                const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
                for (int i = 0; i < P; ++i) {
                    sum[i][quarter] = _mm256_add_epi32(sum[i][quarter], _mm256_madd_epi16(wide, inputs[i]));
                }
            }
        }
        block += 64 * vectors;
        for (int i = 0; i < P; ++i) {
            const __m256i offset = _mm256_set1_epi32(-128 * x.sums[(p + i) * x.groups + g]);
            const float scale_x = x.scales[(p + i) * x.groups + g];
            for (int half = 0; half < 2; ++half) {
                // hadd leaves rows 0 1 4 5 | 2 3 6 7.
                const __m256i mixed = _mm256_hadd_epi32(sum[i][2 * half], sum[i][2 * half + 1]);
                const __m256i isum = _mm256_add_epi32(_mm256_permute4x64_epi64(mixed, 0xD8), offset);
                acc[i][half] = add_group(acc[i][half], isum, half == 0 ? scale_low : scale_high, scale_x);
            }
        }
    }
    for (int i = 0; i < P; ++i) store_rows(y + (p + i) * y_stride, acc[i][0], acc[i][1], rows);
}

template <typename Scales>
void int4_product(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                  int64_t y_stride) {
    const int64_t block_bytes = x.groups * int4_record_bytes(x.group, Scales::bytes);
    for (int64_t b = block_begin; b < block_end; ++b) {
        const uint8_t* block = w + b * block_bytes;
        int64_t p = 0;
        for (; p + 2 <= x.n; p += 2) int4_block<Scales, 2>(block, x, p, rows - b * kRowBlock, y + b * kRowBlock, y_stride);
        if (p < x.n) int4_block<Scales, 1>(block, x, p, rows - b * kRowBlock, y + b * kRowBlock, y_stride);
    }
}

}  // namespace

int64_t quantize(const float* x, int64_t cols, int64_t group, int8_t* q, float* scales, int32_t* sums) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    for (int64_t begin = 0, g = 0; begin < cols; begin += group, ++g) {
        const int64_t count = cols - begin < group ? cols - begin : group;
        // Magnitudes compare as integers, and everything above infinity's pattern is NaN.
        __m256i most = _mm256_setzero_si256();
        for (int64_t i = 0; i < count; i += 8) {
            const __m256i bits = _mm256_castps_si256(load(x + begin + i, count - i));
            most = _mm256_max_epi32(most, _mm256_and_si256(bits, magnitude));
        }
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
        if (_mm_cvtsi128_si32(four) >= 0x7f800000) {
            for (int64_t i = begin;; ++i) {
                if ((load32(x + i) & 0x7fffffff) >= 0x7f800000) return i;
            }
        }
        const float largest = _mm_cvtss_f32(_mm_castsi128_ps(four));
        const bool zero = largest < 1e-30f;
        const float scale = zero ? 0.0f : largest / 127.0f;
        const __m256 divisor = _mm256_set1_ps(zero ? __builtin_inff() : scale);  // x / infinity rounds to 0
        __m256i sum = _mm256_setzero_si256();
        for (int64_t i = 0; i < group; i += 8) {
            const __m256 quotient = _mm256_div_ps(load(x + begin + i, count - i), divisor);
            const __m256 clipped = _mm256_min_ps(_mm256_max_ps(quotient, _mm256_set1_ps(-127.0f)), _mm256_set1_ps(127.0f));
            const __m256i rounded = _mm256_cvtps_epi32(clipped);  // ties to even
            sum = _mm256_add_epi32(sum, rounded);
            const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
            _mm_storel_epi64(reinterpret_cast<__m128i*>(q + begin + i), _mm_packs_epi16(words, words));
        }
        __m128i total = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0x4E));
        total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0xB1));
        scales[g] = scale;
        sums[g] = _mm_cvtsi128_si32(total);
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
    const int64_t block_bytes = int8_block_bytes(x.groups);
    for (int64_t b = block_begin; b < block_end; ++b) {
        int64_t p = 0;
        for (; p + 2 <= x.n; p += 2) int8_block<2>(w + b * block_bytes, x, p, rows - b * kRowBlock, y + b * kRowBlock, y_stride);
        if (p < x.n) int8_block<1>(w + b * block_bytes, x, p, rows - b * kRowBlock, y + b * kRowBlock, y_stride);
    }
}

}  // namespace colibri::avx2
