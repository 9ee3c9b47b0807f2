// Scores from logits with an exponential made of integers: the same bits on every machine, library and compiler.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

namespace colibri::routing {

// exp(x) for x <= 0. Arguments below -100 count as -100; the relative error is about 2^-30.
double exact_exp(double x);

// A score or weight: rounded to float32 first, then 0 below the smallest normal, so that flush-to-zero changes nothing.
inline float to_float32(double value) {
    const float rounded = static_cast<float>(value);
    return rounded < 0x1p-126f ? 0.0f : rounded;
}

// A score or weight in units of 2^-32, half to even. Sums of these do not depend on their order.
inline int64_t to_units(float value) { return static_cast<int64_t>(std::rint(static_cast<double>(value) * 0x1p32)); }

// Softmax sums exponentials in units of 2^-50 as int64; more experts than this could overflow it.
inline constexpr int64_t kMaxSoftmaxExperts = (int64_t{1} << 13) - 1;

// scores[e] = sigmoid(logits[e]).
void sigmoid_scores(std::span<const float> logits, std::span<float> scores);

// scores[e] = softmax(logits)[e]. `exponentials` is scratch of the same length, 1 to kMaxSoftmaxExperts.
void softmax_scores(std::span<const float> logits, std::span<float> scores, std::span<double> exponentials);

}  // namespace colibri::routing
