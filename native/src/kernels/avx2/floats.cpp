// AVX2 kernels: float32 reductions, norms, softmax and SiLU. Each equals kernels/scalar/floats.cpp bit for bit.
#define COLIBRI_ISA avx2
#include "../parts.h"
#include "lanes.h"

namespace colibri::avx2 {

float dot(const float* a, const float* b, int64_t n) {
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        low = _mm256_add_ps(low, _mm256_mul_ps(load(a + i, n - i), load(b + i, n - i)));
        high = _mm256_add_ps(high, _mm256_mul_ps(load(a + i + 8, n - i - 8), load(b + i + 8, n - i - 8)));
    }
    return join(low, high);
}

double dot_f64(const float* a, const float* b, int64_t n) {
    __m256d partial[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    for (int64_t i = 0; i < n; i += 16) {
        const __m256 a_low = load(a + i, n - i), a_high = load(a + i + 8, n - i - 8);
        const __m256 b_low = load(b + i, n - i), b_high = load(b + i + 8, n - i - 8);
        const __m128 as[4] = {_mm256_castps256_ps128(a_low), _mm256_extractf128_ps(a_low, 1), _mm256_castps256_ps128(a_high),
                              _mm256_extractf128_ps(a_high, 1)};
        const __m128 bs[4] = {_mm256_castps256_ps128(b_low), _mm256_extractf128_ps(b_low, 1), _mm256_castps256_ps128(b_high),
                              _mm256_extractf128_ps(b_high, 1)};
        for (int k = 0; k < 4; ++k) {
            partial[k] = _mm256_add_pd(partial[k], _mm256_mul_pd(_mm256_cvtps_pd(as[k]), _mm256_cvtps_pd(bs[k])));
        }
    }
    const __m256d low = _mm256_add_pd(partial[0], partial[2]), high = _mm256_add_pd(partial[1], partial[3]);
    const __m256d four = _mm256_add_pd(low, high);
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// One partial sum after the other, 32 columns at a time: sixteen sums of 32 columns do not fit in sixteen registers.
void dot_columns(const float* w, int64_t w_stride, int64_t rows, int64_t cols, const float* x, float* y) {
    for (int64_t c = 0; c < cols; c += 32) {
        const int vectors = cols - c >= 32 ? 4 : static_cast<int>((cols - c + 7) / 8);
        __m256 partial[kPartialSums][4];
        for (int j = 0; j < kPartialSums; ++j) {
            for (int v = 0; v < 4; ++v) partial[j][v] = _mm256_setzero_ps();
            for (int64_t r = j; r < rows; r += kPartialSums) {
                const __m256 factor = _mm256_set1_ps(x[r]);
                for (int v = 0; v < vectors; ++v) {
                    const __m256 row = load(w + r * w_stride + c + 8 * v, cols - c - 8 * v);
                    partial[j][v] = _mm256_add_ps(partial[j][v], _mm256_mul_ps(factor, row));
                }
            }
        }
        for (int v = 0; v < vectors; ++v) {
            for (int half = kPartialSums / 2; half > 0; half /= 2) {
                for (int j = 0; j < half; ++j) partial[j][v] = _mm256_add_ps(partial[j][v], partial[j + half][v]);
            }
            store(y + c + 8 * v, cols - c - 8 * v, partial[0][v]);
        }
    }
}

void axpy(float a, const float* x, int64_t n, float* y) {
    const __m256 factor = _mm256_set1_ps(a);
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 product = _mm256_mul_ps(factor, load(x + i, n - i));
        store(y + i, n - i, _mm256_add_ps(load(y + i, n - i), product));
    }
}

static float inverse_root(float mean, float eps) { return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps))); }

void rms_norm(const float* x, const float* w, float eps, int64_t n, float* y) {
    const float mean = dot(x, x, n) / static_cast<float>(n);
    const __m256 inverse = _mm256_set1_ps(inverse_root(mean, eps));
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 scaled = _mm256_mul_ps(load(x + i, n - i), inverse);
        store(y + i, n - i, _mm256_mul_ps(scaled, load(w + i, n - i)));
    }
}

void layer_norm(const float* x, const float* w, const float* b, float eps, int64_t n, float* y) {
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t i = 0; i < n; i += 16) {
        sums[0] = _mm256_add_ps(sums[0], load(x + i, n - i));
        sums[1] = _mm256_add_ps(sums[1], load(x + i + 8, n - i - 8));
    }
    const __m256 mean = _mm256_set1_ps(join(sums[0], sums[1]) / static_cast<float>(n));
    __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t i = 0; i < n; i += 16) {
        for (int k = 0; k < 2; ++k) {
            const int64_t left = n - i - 8 * k;
            const __m256 centred = _mm256_sub_ps(load(x + i + 8 * k, left), mean);
            const __m256 present = _mm256_and_ps(centred, _mm256_castsi256_ps(lanes_below(left)));
            squares[k] = _mm256_add_ps(squares[k], _mm256_mul_ps(present, present));
        }
    }
    const __m256 inverse = _mm256_set1_ps(inverse_root(join(squares[0], squares[1]) / static_cast<float>(n), eps));
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 scaled = _mm256_mul_ps(_mm256_sub_ps(load(x + i, n - i), mean), inverse);
        const __m256 weighted = _mm256_mul_ps(scaled, load(w + i, n - i));
        store(y + i, n - i, _mm256_add_ps(weighted, load(b + i, n - i)));
    }
}

void softmax(float* x, int64_t n) {
    float largest = -__builtin_inff();
    for (int64_t i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
    const __m256 shift = _mm256_set1_ps(largest);
    float sum = 0.0f;
    for (int64_t i = 0; i < n; i += 8) {
        store(x + i, n - i, exponential(_mm256_sub_ps(load(x + i, n - i), shift)));
    }
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    const __m256 divisor = _mm256_set1_ps(sum);
    for (int64_t i = 0; i < n; i += 8) {
        store(x + i, n - i, _mm256_div_ps(load(x + i, n - i), divisor));
    }
}

void silu_mul(const float* gate, const float* up, int64_t n, float* y) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 g = load(gate + i, n - i);
        const __m256 denominator = _mm256_add_ps(_mm256_set1_ps(1.0f), exponential(_mm256_xor_ps(g, sign)));
        const __m256 value = _mm256_mul_ps(_mm256_div_ps(g, denominator), load(up + i, n - i));
        store(y + i, n - i, value);
    }
}

}  // namespace colibri::avx2
