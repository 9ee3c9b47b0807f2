// Scalar kernels: quantised activations and the integer products with rows16 weights (design of both: colibri_jax/quant.py).
#include <bit>
#include <cmath>
#include <cstring>
#define COLIBRI_ISA scalar
#include "../parts.h"

namespace colibri {

float float_of_half(uint16_t half) {
    const uint32_t sign = uint32_t{half} >> 15 << 31, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) {  // a count of 2^-24, normal in float32
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    const uint32_t special = 0x7f800000 | (fraction != 0 ? 0x400000 : 0), biased = (exponent + 112) << 23;
    return std::bit_cast<float>(sign | (exponent == 31 ? special : biased) | fraction << 13);
}

}  // namespace colibri

namespace colibri::scalar {

namespace {

constexpr float kSmallestMax = 1e-30f;  // a group below it is zero: x / s would leave the normal range

// Floats inside packed weights have no alignment.
float load_float(const uint8_t* bytes) {
    float value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

// The 16 scales of an int4 record, by row.
struct F32Scales {
    static constexpr int64_t bytes = 4;
    static float at(const uint8_t* scales, int64_t row) { return load_float(scales + bytes * row); }
};
struct F16Scales {
    static constexpr int64_t bytes = 2;
    static float at(const uint8_t* scales, int64_t row) {
        uint16_t half;
        std::memcpy(&half, scales + bytes * row, sizeof half);
        return float_of_half(half);
    }
};

template <typename Scales>
void int4_product(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                  int64_t y_stride) {
    const int64_t vectors = x.group / 8;  // 64 bytes each: 8 inputs of 16 rows
    const int64_t record_bytes = int4_record_bytes(x.group, Scales::bytes);
    for (int64_t row = block_begin * kRowBlock; row < block_end * kRowBlock && row < rows; ++row) {
        const uint8_t* block = w + row / kRowBlock * x.groups * record_bytes;
        const int64_t lane = row % kRowBlock;
        for (int64_t p = 0; p < x.n; ++p) {
            float sum = 0.0f;
            for (int64_t g = 0; g < x.groups; ++g) {
                const uint8_t* record = block + g * record_bytes;
                const uint8_t* weights = record + 4 * lane;
                const int8_t* q = x.q + (p * x.groups + g) * x.group;
                int32_t isum = -8 * x.sums[p * x.groups + g];
                for (int64_t t = 0; t < vectors; ++t) {
                    for (int64_t k = 0; k < 4; ++k) {
                        const int32_t pair = weights[64 * t + k];
                        isum += (pair & 15) * q[8 * t + k] + (pair >> 4) * q[8 * t + 4 + k];
                    }
                }
                const float scale = Scales::at(record + 64 * vectors, lane);
                sum += static_cast<float>(isum) * (scale * x.scales[p * x.groups + g]);
            }
            y[p * y_stride + row] = sum;
        }
    }
}

template <typename Scales>
void int4_values(const uint8_t* block, int64_t cols, int64_t group, float* out, int64_t out_stride) {
    for (int64_t row = 0; row < kRowBlock; ++row) {
        for (int64_t i = 0; i < cols; ++i) {
            const uint8_t* record = block + i / group * int4_record_bytes(group, Scales::bytes);
            const int64_t inner = i % group;
            const uint8_t pair = record[inner / 8 * 64 + 4 * row + inner % 4];
            const int32_t q = (inner % 8 < 4 ? pair & 15 : pair >> 4) - 8;
            out[row * out_stride + i] = static_cast<float>(q) * Scales::at(record + 8 * group, row);
        }
    }
}

}  // namespace

int64_t quantize(const float* x, int64_t cols, int64_t group, int8_t* q, float* scales, int32_t* sums) {
    for (int64_t i = 0; i < cols; ++i) {
        if (!std::isfinite(x[i])) return i;
    }
    for (int64_t begin = 0, g = 0; begin < cols; begin += group, ++g) {
        const int64_t count = cols - begin < group ? cols - begin : group;
        float largest = 0.0f;
        for (int64_t i = 0; i < count; ++i) largest = std::fmax(largest, std::fabs(x[begin + i]));
        const float scale = largest < kSmallestMax ? 0.0f : largest / 127.0f;
        int32_t sum = 0;
        for (int64_t i = 0; i < group; ++i) {
            int32_t value = 0;
            if (i < count && scale != 0.0f) {
                const float rounded = std::nearbyint(x[begin + i] / scale);
                value = static_cast<int32_t>(std::fmin(std::fmax(rounded, -127.0f), 127.0f));
            }
            q[begin + i] = static_cast<int8_t>(value);
            sum += value;
        }
        scales[g] = scale;
        sums[g] = sum;
    }
    return -1;
}

void matmul_int4(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                 int64_t y_stride) {
    int4_product<F32Scales>(w, rows, block_begin, block_end, x, y, y_stride);
}

void matmul_int4_f16(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x,
                     float* y, int64_t y_stride) {
    int4_product<F16Scales>(w, rows, block_begin, block_end, x, y, y_stride);
}

void matmul_int8(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                 int64_t y_stride) {
    const int64_t vectors = x.group / 4;  // 64 bytes each: 4 inputs of 16 rows
    const int64_t block_bytes = int8_block_bytes(x.groups);
    for (int64_t row = block_begin * kRowBlock; row < block_end * kRowBlock && row < rows; ++row) {
        const uint8_t* block = w + row / kRowBlock * block_bytes;
        const int64_t lane = row % kRowBlock;
        const float scale = load_float(block + 4 * lane);
        for (int64_t p = 0; p < x.n; ++p) {
            float sum = 0.0f;
            for (int64_t g = 0; g < x.groups; ++g) {
                const uint8_t* weights = block + 4 * kRowBlock + g * 64 * vectors + 4 * lane;
                const int8_t* q = x.q + (p * x.groups + g) * x.group;
                int32_t isum = -128 * x.sums[p * x.groups + g];
                for (int64_t t = 0; t < vectors; ++t) {
                    for (int64_t k = 0; k < 4; ++k) isum += weights[64 * t + k] * q[4 * t + k];
                }
                sum += static_cast<float>(isum) * (scale * x.scales[p * x.groups + g]);
            }
            y[p * y_stride + row] = sum;
        }
    }
}

void dequantize_int4_block(const uint8_t* block, int64_t cols, int64_t group, float* out, int64_t out_stride) {
    int4_values<F32Scales>(block, cols, group, out, out_stride);
}

void dequantize_int4_f16_block(const uint8_t* block, int64_t cols, int64_t group, float* out, int64_t out_stride) {
    int4_values<F16Scales>(block, cols, group, out, out_stride);
}

void dequantize_int8_block(const uint8_t* block, int64_t cols, float* out, int64_t out_stride) {
    const uint8_t* weights = block + 4 * kRowBlock;
    for (int64_t row = 0; row < kRowBlock; ++row) {
        const float scale = load_float(block + 4 * row);
        for (int64_t i = 0; i < cols; ++i) {
            const int32_t q = weights[i / 4 * 64 + 4 * row + i % 4] - 128;
            out[row * out_stride + i] = static_cast<float>(q) * scale;
        }
    }
}

void dequantize_int4_row(const uint8_t* row, const float* scales, int64_t cols, int64_t group, float* out) {
    for (int64_t i = 0; i < cols; ++i) {
        const int32_t q = (i % 2 == 0 ? row[i / 2] & 15 : row[i / 2] >> 4) - 8;
        out[i] = static_cast<float>(q) * scales[group > 0 ? i / group : 0];
    }
}

void dequantize_int8_row(const int8_t* row, float scale, int64_t cols, float* out) {
    for (int64_t i = 0; i < cols; ++i) out[i] = static_cast<float>(row[i]) * scale;
}

}  // namespace colibri::scalar
