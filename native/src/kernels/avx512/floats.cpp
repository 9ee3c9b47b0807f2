// AVX-512 kernels: float32 reductions, norms, softmax and SiLU. Each equals kernels/scalar/floats.cpp bit for bit.
#define COLIBRI_ISA avx512
#include "../parts.h"
#include "lanes.h"

namespace colibri::avx512 {

float dot(const float* a, const float* b, int64_t n) {
    __m512 partial = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        partial = _mm512_add_ps(partial, _mm512_mul_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i)));
    }
    if (i < n) partial = _mm512_add_ps(partial, _mm512_mul_ps(load(a + i, n - i), load(b + i, n - i)));
    return join(partial);
}

double dot_f64(const float* a, const float* b, int64_t n) {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 x = load(a + i, n - i), y = load(b + i, n - i);
        const __m512d x_low = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), y_low = _mm512_cvtps_pd(_mm512_castps512_ps256(y));
        const __m512d x_high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)),
                      y_high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(y, 1));
        low = _mm512_add_pd(low, _mm512_mul_pd(x_low, y_low));
        high = _mm512_add_pd(high, _mm512_mul_pd(x_high, y_high));
    }
    const __m512d eight = _mm512_add_pd(low, high);
    const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// Sixteen columns at a time, one register per partial sum.
void dot_columns(const float* w, int64_t w_stride, int64_t rows, int64_t cols, const float* x, float* y) {
    for (int64_t c = 0; c < cols; c += 16) {
        const __mmask16 mask = lanes_below(cols - c);
        __m512 partial[kPartialSums];
#pragma GCC unroll 16
        for (int j = 0; j < kPartialSums; ++j) partial[j] = _mm512_setzero_ps();
        int64_t r = 0;
        for (; r + kPartialSums <= rows; r += kPartialSums) {
#pragma GCC unroll 16
            for (int j = 0; j < kPartialSums; ++j) {
                const __m512 row = _mm512_maskz_loadu_ps(mask, w + (r + j) * w_stride + c);
                partial[j] = _mm512_add_ps(partial[j], _mm512_mul_ps(_mm512_set1_ps(x[r + j]), row));
            }
        }
#pragma GCC unroll 16
        for (int j = 0; j < kPartialSums; ++j) {
            if (r + j < rows) {
                const __m512 row = _mm512_maskz_loadu_ps(mask, w + (r + j) * w_stride + c);
                partial[j] = _mm512_add_ps(partial[j], _mm512_mul_ps(_mm512_set1_ps(x[r + j]), row));
            }
        }
#pragma GCC unroll 4
        for (int half = kPartialSums / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
            for (int j = 0; j < half; ++j) partial[j] = _mm512_add_ps(partial[j], partial[j + half]);
        }
        _mm512_mask_storeu_ps(y + c, mask, partial[0]);
    }
}

void axpy(float a, const float* x, int64_t n, float* y) {
    const __m512 factor = _mm512_set1_ps(a);
    for (int64_t i = 0; i < n; i += 16) {
        store(y + i, n - i, _mm512_add_ps(load(y + i, n - i), _mm512_mul_ps(factor, load(x + i, n - i))));
    }
}

static float inverse_root(float mean, float eps) { return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps))); }

void rms_norm(const float* x, const float* w, float eps, int64_t n, float* y) {
    const float mean = dot(x, x, n) / static_cast<float>(n);
    const __m512 inverse = _mm512_set1_ps(inverse_root(mean, eps));
    for (int64_t i = 0; i < n; i += 16) {
        store(y + i, n - i, _mm512_mul_ps(_mm512_mul_ps(load(x + i, n - i), inverse), load(w + i, n - i)));
    }
}

void layer_norm(const float* x, const float* w, const float* b, float eps, int64_t n, float* y) {
    __m512 sums = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) sums = _mm512_add_ps(sums, load(x + i, n - i));
    const __m512 mean = _mm512_set1_ps(join(sums) / static_cast<float>(n));
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 centred = _mm512_maskz_sub_ps(lanes_below(n - i), load(x + i, n - i), mean);
        squares = _mm512_add_ps(squares, _mm512_mul_ps(centred, centred));
    }
    const __m512 inverse = _mm512_set1_ps(inverse_root(join(squares) / static_cast<float>(n), eps));
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 scaled = _mm512_mul_ps(_mm512_sub_ps(load(x + i, n - i), mean), inverse);
        store(y + i, n - i, _mm512_add_ps(_mm512_mul_ps(scaled, load(w + i, n - i)), load(b + i, n - i)));
    }
}

void softmax(float* x, int64_t n) {
    float largest = -__builtin_inff();
    for (int64_t i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
    const __m512 shift = _mm512_set1_ps(largest);
    for (int64_t i = 0; i < n; i += 16) store(x + i, n - i, exponential(_mm512_sub_ps(load(x + i, n - i), shift)));
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    const __m512 divisor = _mm512_set1_ps(sum);
    for (int64_t i = 0; i < n; i += 16) store(x + i, n - i, _mm512_div_ps(load(x + i, n - i), divisor));
}

void silu_mul(const float* gate, const float* up, int64_t n, float* y) {
    const __m512 sign = _mm512_set1_ps(-0.0f);
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 g = load(gate + i, n - i);
        const __m512 denominator = _mm512_add_ps(_mm512_set1_ps(1.0f), exponential(_mm512_xor_ps(g, sign)));
        store(y + i, n - i, _mm512_mul_ps(_mm512_div_ps(g, denominator), load(up + i, n - i)));
    }
}

}  // namespace colibri::avx512
