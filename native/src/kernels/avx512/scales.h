// AVX-512 kernels: the 16 scales of an int4 record, float32 or float16. The conversion is exact, and no flag of the processor
// changes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace colibri::avx512 {
namespace {

struct F32Scales {
    static constexpr int64_t bytes = 4;
    static __m512 all(const uint8_t* scales) { return _mm512_loadu_ps(reinterpret_cast<const float*>(scales)); }
    static float at(const uint8_t* scales, int64_t row) {
        float value;
        __builtin_memcpy(&value, scales + bytes * row, sizeof value);
        return value;
    }
};

struct F16Scales {
    static constexpr int64_t bytes = 2;
    static __m512 all(const uint8_t* scales) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
    }
    static float at(const uint8_t* scales, int64_t row) {
        uint16_t value;
        __builtin_memcpy(&value, scales + bytes * row, sizeof value);
        return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(value)));
    }
};

}  // namespace
}  // namespace colibri::avx512
