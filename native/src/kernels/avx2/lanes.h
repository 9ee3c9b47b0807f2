// AVX2 kernels: masks for short ends, joining of partial sums and exp on eight lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../exp_constants.h"

namespace colibri::avx2 {

// Lanes i < n are all ones. Masked loads give +0 in the other lanes and touch no memory there.
static inline __m256i lanes_below(int64_t n) {
    const int clipped = n >= 8 ? 8 : n <= 0 ? 0 : static_cast<int>(n);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(clipped), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Up to eight values, +0 past the first `left`; and their storing. Whole vectors take the plain instructions: masked
// stores are slow on some processors.
static inline __m256 load(const float* from, int64_t left) {
    return left >= 8 ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, lanes_below(left));
}
static inline void store(float* to, int64_t left, __m256 values) {
    if (left >= 8) {
        _mm256_storeu_ps(to, values);
    } else {
        _mm256_maskstore_ps(to, lanes_below(left), values);
    }
}

// Halving: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
static inline float join(__m256 low, __m256 high) {
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// The scalar exponential, lane by lane; the operand order of min and max lets NaN pass.
static inline __m256 exponential(__m256 x) {
    using namespace exp_constants;
    x = _mm256_max_ps(_mm256_set1_ps(kLowest), x);
    x = _mm256_min_ps(_mm256_set1_ps(kHighest), x);
    const __m256 shifted = _mm256_add_ps(_mm256_mul_ps(x, _mm256_set1_ps(kLog2E)), _mm256_set1_ps(kRound));
    const __m256 n = _mm256_sub_ps(shifted, _mm256_set1_ps(kRound));
    const __m256 high = _mm256_sub_ps(x, _mm256_mul_ps(n, _mm256_set1_ps(kLn2High)));
    const __m256 r = _mm256_sub_ps(high, _mm256_mul_ps(n, _mm256_set1_ps(kLn2Low)));
    __m256 tail = _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(kP4), r), _mm256_set1_ps(kP3));
    tail = _mm256_add_ps(_mm256_mul_ps(tail, r), _mm256_set1_ps(kP2));
    tail = _mm256_add_ps(_mm256_mul_ps(tail, r), _mm256_set1_ps(kP1));
    tail = _mm256_add_ps(_mm256_mul_ps(tail, r), _mm256_set1_ps(kP0));
    const __m256 above_one = _mm256_add_ps(_mm256_mul_ps(tail, _mm256_mul_ps(r, r)), r);
    const __m256 mantissa = _mm256_add_ps(above_one, _mm256_set1_ps(1.0f));
    const __m256i exponent = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(kRoundBits));
    const __m256i half = _mm256_srai_epi32(exponent, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(exponent, half), bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(mantissa, first), second);
}

}  // namespace colibri::avx2
