// Rotary position embedding: theta^(-2i / dim), or YaRN's blend of it with the same divided by a factor (arXiv 2309.00071, §3.2).
#include "rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

namespace colibri {

namespace {

// The frequency index at which `rotations` turns fit into the positions of training.
double correction_index(const RopeSpec& spec, double rotations) {
    const double dim = static_cast<double>(spec.dim);
    return dim * std::log(spec.yarn.original_positions / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(spec.theta));
}

double frequency(const RopeSpec& spec, int64_t i) {
    const double plain = std::pow(spec.theta, -2.0 * static_cast<double>(i) / static_cast<double>(spec.dim));
    if (spec.yarn.factor == 0.0) return plain;
    double low = correction_index(spec, spec.yarn.beta_fast), high = correction_index(spec, spec.yarn.beta_slow);
    if (spec.yarn.truncate) {
        low = std::floor(low);
        high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, static_cast<double>(spec.dim - 1));
    if (low == high) high += 0.001;
    const double stretched = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    return plain / spec.yarn.factor * stretched + plain * (1.0 - stretched);
}

}  // namespace

Rope::Rope(const RopeSpec& spec, int64_t positions)
    : half_(spec.dim / 2), interleaved_(spec.interleaved), cos_(positions * half_), sin_(positions * half_) {
    for (int64_t i = 0; i < half_; ++i) {
        const double per_position = frequency(spec, i);
        for (int64_t p = 0; p < positions; ++p) {
            const double angle = static_cast<double>(p) * per_position;
            cos_[p * half_ + i] = static_cast<float>(std::cos(angle) * spec.attention_factor);
            sin_[p * half_ + i] = static_cast<float>(std::sin(angle) * spec.attention_factor);
        }
    }
}

void Rope::rotate(int64_t position, float* x, float* scratch) const {
    const float* cos = cos_.data() + position * half_;
    const float* sin = sin_.data() + position * half_;
    const int64_t step = interleaved_ ? 2 : 1, partner = interleaved_ ? 1 : half_;
    for (int64_t i = 0; i < half_; ++i) {
        const float a = x[step * i], b = x[step * i + partner];
        scratch[i] = a * cos[i] - b * sin[i];
        scratch[half_ + i] = b * cos[i] + a * sin[i];
    }
    std::memcpy(x, scratch, 2 * half_ * sizeof(float));
}

}  // namespace colibri
