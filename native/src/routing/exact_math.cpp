// Scores from logits with an exponential made of integers.
#include "exact_math.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>

namespace colibri::routing {
namespace {

constexpr int kFractionBits = 30;
constexpr int kUnitBits = 31;
constexpr double kLog2E = 1.4426950408889634 * 0x1p30;  // a power of two scales exactly: one rounding in x · kLog2E
constexpr double kLowest = -100.0;

// round(2^31 · (ln 2)^i / i!): the Taylor series of 2^fraction.
constexpr std::array<int64_t, 11> kSeries = {2147483648, 1488522236, 515882496, 119194166, 20654775, 2863360,
                                             330788,     32755,      2838,      219,       15};

// 2^exponent for exponents of normal numbers.
double power_of_two(int64_t exponent) { return std::bit_cast<double>(static_cast<uint64_t>(1023 + exponent) << 52); }

}  // namespace

double exact_exp(double x) {
    // t = floor part and fraction of x·log2(e), in units of 2^-30; >> of a negative int64 rounds down (C++20).
    const auto t = static_cast<int64_t>(std::rint(std::max(x, kLowest) * kLog2E));
    const int64_t whole = t >> kFractionBits;
    const int64_t fraction = t & ((int64_t{1} << kFractionBits) - 1);
    int64_t m = kSeries.back();
    for (size_t i = kSeries.size() - 1; i-- > 0;) m = kSeries[i] + ((m * fraction) >> kFractionBits);
    // m <= 2^32 converts exactly, and whole >= -145 keeps the power normal: the product is ldexp's, without its call.
    return static_cast<double>(m) * power_of_two(whole - kUnitBits);
}

void sigmoid_scores(std::span<const float> logits, std::span<float> scores) {
    for (size_t i = 0; i < logits.size(); ++i) {
        const double e = exact_exp(-std::fabs(static_cast<double>(logits[i])));
        scores[i] = to_float32((logits[i] >= 0.0f ? 1.0 : e) / (1.0 + e));
    }
}

void softmax_scores(std::span<const float> logits, std::span<float> scores, std::span<double> exponentials) {
    const double top = *std::max_element(logits.begin(), logits.end());
    int64_t units = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
        exponentials[i] = exact_exp(static_cast<double>(logits[i]) - top);
        units += static_cast<int64_t>(std::rint(exponentials[i] * 0x1p50));
    }
    const double sum = static_cast<double>(units) * 0x1p-50;
    for (size_t i = 0; i < logits.size(); ++i) scores[i] = to_float32(exponentials[i] / sum);
}

}  // namespace colibri::routing
