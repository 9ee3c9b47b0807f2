// AVX2 kernels: float32 values of quantised weights. Each equals kernels/scalar/quantized.cpp bit for bit: float(q) * scale.
#define COLIBRI_ISA avx2
#include "../parts.h"
#include "lanes.h"
#include "scales.h"

namespace colibri::avx2 {

namespace {

inline int32_t load32(const void* bytes) {
    int32_t value;
    __builtin_memcpy(&value, bytes, sizeof value);
    return value;
}

// Eight unsigned bytes, minus their offset, times the scale.
inline __m256 scaled(__m128i bytes, int32_t offset, float scale) {
    const __m256i q = _mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(offset));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(q), _mm256_set1_ps(scale));
}

inline float nibble_value(const uint8_t* row, int64_t i, float scale) {
    return static_cast<float>((i % 2 == 0 ? row[i / 2] & 15 : row[i / 2] >> 4) - 8) * scale;
}

// Row-major nibbles of [begin, end), begin even, with one scale.
void int4_run(const uint8_t* row, float scale, int64_t begin, int64_t end, float* out) {
    const __m128i nibble = _mm_set1_epi8(15);
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) {
        const __m128i pairs = _mm_cvtsi32_si128(load32(row + i / 2));
        const __m128i low = _mm_and_si128(pairs, nibble), high = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        _mm256_storeu_ps(out + i, scaled(_mm_unpacklo_epi8(low, high), 8, scale));
    }
    for (; i < end; ++i) out[i] = nibble_value(row, i, scale);
}

template <typename Scales>
void int4_values(const uint8_t* block, int64_t cols, int64_t group, float* out, int64_t out_stride) {
    const __m128i nibble = _mm_set1_epi8(15);
    const int64_t record_bytes = int4_record_bytes(group, Scales::bytes);
    for (int64_t begin = 0; begin < cols; begin += group, block += record_bytes) {
        for (int64_t row = 0; row < kRowBlock; ++row) {
            const float scale = Scales::at(block + 8 * group, row);
            for (int64_t i = 0; i < group && begin + i < cols; i += 8) {
                const __m128i pairs = _mm_cvtsi32_si128(load32(block + 8 * i + 4 * row));
                const __m128i low = _mm_and_si128(pairs, nibble), high = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
                store(out + row * out_stride + begin + i, cols - begin - i, scaled(_mm_unpacklo_epi32(low, high), 8, scale));
            }
        }
    }
}

}  // namespace

void dequantize_int4_block(const uint8_t* block, int64_t cols, int64_t group, float* out, int64_t out_stride) {
    int4_values<F32Scales>(block, cols, group, out, out_stride);
}

void dequantize_int4_f16_block(const uint8_t* block, int64_t cols, int64_t group, float* out, int64_t out_stride) {
    int4_values<F16Scales>(block, cols, group, out, out_stride);
}

void dequantize_int8_block(const uint8_t* block, int64_t cols, float* out, int64_t out_stride) {
    const uint8_t* weights = block + 4 * kRowBlock;
    for (int64_t row = 0; row < kRowBlock; ++row) {
        const float scale = F32Scales::at(block, row);
        for (int64_t i = 0; i < cols; i += 8) {
            // A block holds whole groups of 64 inputs, so both vectors exist.
            const uint8_t* bytes = weights + 16 * i + 4 * row;
            const __m128i eight = _mm_insert_epi32(_mm_cvtsi32_si128(load32(bytes)), load32(bytes + 64), 1);
            store(out + row * out_stride + i, cols - i, scaled(eight, 128, scale));
        }
    }
}

void dequantize_int4_row(const uint8_t* row, const float* scales, int64_t cols, int64_t group, float* out) {
    if (group <= 0 || group >= cols) {
        if (cols > 0) int4_run(row, scales[0], 0, cols, out);
    } else if (group % 2 == 0) {
        for (int64_t begin = 0; begin < cols; begin += group) {
            int4_run(row, scales[begin / group], begin, begin + group < cols ? begin + group : cols, out);
        }
    } else {
        for (int64_t i = 0; i < cols; ++i) out[i] = nibble_value(row, i, scales[i / group]);
    }
}

void dequantize_int8_row(const int8_t* row, float scale, int64_t cols, float* out) {
    const __m256 factor = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 8 <= cols; i += 8) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + i));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), factor));
    }
    for (; i < cols; ++i) out[i] = static_cast<float>(row[i]) * scale;
}

}  // namespace colibri::avx2
