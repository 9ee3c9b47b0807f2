// Scalar kernels: float32 reductions, norms, softmax and SiLU, one rounding at a time in the order of design section 4.
#include <cmath>
#include <cstring>
#define COLIBRI_ISA scalar
#include "../exp_constants.h"
#include "../parts.h"

namespace colibri::scalar {

namespace {

// Partial sums begin at +0, so none of them is ever -0 and an absent element may be added as +0.
template <typename T>
T join(T* partial) {
    for (int half = kPartialSums / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
    }
    return partial[0];
}

float power_of_two(uint32_t exponent) {
    const uint32_t bits = (exponent + 127u) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

float exponential(float x) {
    using namespace exp_constants;
    x = kLowest > x ? kLowest : x;  // written so that NaN passes
    x = kHighest < x ? kHighest : x;
    const float shifted = x * kLog2E + kRound;
    const float n = shifted - kRound;
    const float r = (x - n * kLn2High) - n * kLn2Low;
    const float tail = (((kP4 * r + kP3) * r + kP2) * r + kP1) * r + kP0;
    const float mantissa = (tail * (r * r) + r) + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    // Two factors, because 2^n alone leaves the range at both ends; unsigned, because NaN makes n arbitrary.
    const int32_t exponent = static_cast<int32_t>(static_cast<uint32_t>(bits) - static_cast<uint32_t>(kRoundBits));
    const int32_t half = exponent >> 1;
    return mantissa * power_of_two(static_cast<uint32_t>(half)) *
           power_of_two(static_cast<uint32_t>(exponent) - static_cast<uint32_t>(half));
}

}  // namespace

float dot(const float* a, const float* b, int64_t n) {
    float partial[kPartialSums] = {};
    for (int64_t i = 0; i < n; ++i) partial[i % kPartialSums] += a[i] * b[i];
    return join(partial);
}

double dot_f64(const float* a, const float* b, int64_t n) {
    double partial[kPartialSums] = {};
    for (int64_t i = 0; i < n; ++i) partial[i % kPartialSums] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return join(partial);
}

void dot_columns(const float* w, int64_t w_stride, int64_t rows, int64_t cols, const float* x, float* y) {
    for (int64_t c = 0; c < cols; ++c) {
        float partial[kPartialSums] = {};
        for (int64_t r = 0; r < rows; ++r) partial[r % kPartialSums] += x[r] * w[r * w_stride + c];
        y[c] = join(partial);
    }
}

void axpy(float a, const float* x, int64_t n, float* y) {
    for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

void rms_norm(const float* x, const float* w, float eps, int64_t n, float* y) {
    const float mean = dot(x, x, n) / static_cast<float>(n);
    const float inverse = 1.0f / std::sqrt(mean + eps);
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] * inverse) * w[i];
}

void layer_norm(const float* x, const float* w, const float* b, float eps, int64_t n, float* y) {
    float partial[kPartialSums] = {};
    for (int64_t i = 0; i < n; ++i) partial[i % kPartialSums] += x[i];
    const float mean = join(partial) / static_cast<float>(n);
    float squares[kPartialSums] = {};
    for (int64_t i = 0; i < n; ++i) {
        const float difference = x[i] - mean;
        squares[i % kPartialSums] += difference * difference;
    }
    const float inverse = 1.0f / std::sqrt(join(squares) / static_cast<float>(n) + eps);
    for (int64_t i = 0; i < n; ++i) y[i] = ((x[i] - mean) * inverse) * w[i] + b[i];
}

void softmax(float* x, int64_t n) {
    if (n <= 0) return;
    float largest = x[0];
    for (int64_t i = 1; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) {
        x[i] = exponential(x[i] - largest);
        sum += x[i];
    }
    for (int64_t i = 0; i < n; ++i) x[i] /= sum;
}

void silu_mul(const float* gate, const float* up, int64_t n, float* y) {
    for (int64_t i = 0; i < n; ++i) y[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

}  // namespace colibri::scalar
