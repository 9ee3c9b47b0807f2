// Constants of the engine's float32 exp, shared by every instruction set (data only, no code).
//
// exp(x) = 2^n * exp(r), n = rint(x * log2 e), r = x - n ln 2 with ln 2 in two parts; exp(r) = 1 + (r + r^2 * P(r)),
// P of degree 4, fitted by weighted least squares to the smallest largest error on |r| <= 0.3475 (3e-9), then rounded.
// Largest error over all normal results: 0.98 ulp. exp(0) = 1; below -104 the result is 0, above 88.73 infinity; NaN stays.
#pragma once

namespace colibri::exp_constants {

constexpr float kLowest = -104.0f;  // exp is below half the smallest subnormal
constexpr float kHighest = 89.0f;   // exp overflows to infinity
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2High = 0x1.63p-1f;  // 9 bits: its product with |n| <= 151 is exact
constexpr float kLn2Low = -0x1.bd0106p-13f;
constexpr float kRound = 12582912.0f;   // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
constexpr int kRoundBits = 0x4B400000;  // its bit pattern
constexpr float kP0 = 0x1.fffffcp-2f;
constexpr float kP1 = 0x1.55549p-3f;
constexpr float kP2 = 0x1.5558fap-5f;
constexpr float kP3 = 0x1.123b6ap-7f;
constexpr float kP4 = 0x1.6a21acp-10f;

}  // namespace colibri::exp_constants
