// AVX-512 kernels: masks for short ends, joining of partial sums and exp on sixteen lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../exp_constants.h"

namespace colibri::avx512 {

// Lanes i < n. Masked loads give +0 in the other lanes and touch no memory there.
static inline __mmask16 lanes_below(int64_t n) {
    return n >= 16 ? static_cast<__mmask16>(0xFFFF) : n <= 0 ? static_cast<__mmask16>(0) : static_cast<__mmask16>((1u << n) - 1u);
}

static inline __m512 load(const float* from, int64_t left) { return _mm512_maskz_loadu_ps(lanes_below(left), from); }

static inline void store(float* to, int64_t left, __m512 values) { _mm512_mask_storeu_ps(to, lanes_below(left), values); }

// Halving: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
static inline float join(__m512 partial) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(partial), _mm512_extractf32x8_ps(partial, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// The scalar exponential, lane by lane; the operand order of min and max lets NaN pass.
static inline __m512 exponential(__m512 x) {
    using namespace exp_constants;
    x = _mm512_max_ps(_mm512_set1_ps(kLowest), x);
    x = _mm512_min_ps(_mm512_set1_ps(kHighest), x);
    const __m512 shifted = _mm512_add_ps(_mm512_mul_ps(x, _mm512_set1_ps(kLog2E)), _mm512_set1_ps(kRound));
    const __m512 n = _mm512_sub_ps(shifted, _mm512_set1_ps(kRound));
    const __m512 high = _mm512_sub_ps(x, _mm512_mul_ps(n, _mm512_set1_ps(kLn2High)));
    const __m512 r = _mm512_sub_ps(high, _mm512_mul_ps(n, _mm512_set1_ps(kLn2Low)));
    __m512 tail = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(kP4), r), _mm512_set1_ps(kP3));
    tail = _mm512_add_ps(_mm512_mul_ps(tail, r), _mm512_set1_ps(kP2));
    tail = _mm512_add_ps(_mm512_mul_ps(tail, r), _mm512_set1_ps(kP1));
    tail = _mm512_add_ps(_mm512_mul_ps(tail, r), _mm512_set1_ps(kP0));
    const __m512 above_one = _mm512_add_ps(_mm512_mul_ps(tail, _mm512_mul_ps(r, r)), r);
    const __m512 mantissa = _mm512_add_ps(above_one, _mm512_set1_ps(1.0f));
    const __m512i exponent = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(kRoundBits));
    const __m512i half = _mm512_srai_epi32(exponent, 1);
    const __m512i bias = _mm512_set1_epi32(127);
    const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23));
    const __m512 second = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(exponent, half), bias), 23));
    return _mm512_mul_ps(_mm512_mul_ps(mantissa, first), second);
}

}  // namespace colibri::avx512
