// The arithmetic kernels: one table of functions per instruction set, all returning the same bits.
//
// Contract of every entry: plain pointers, no allocation, no threads, safe to call concurrently; no alignment is required
// of inputs unless said; results are bit-equal to the scalar table, for every length. Products and sums are two roundings.
// The definitions stand in colibri_jax/reference/; quant.py documents the rows16 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace colibri {

constexpr int kRowBlock = 16;         // rows interleaved in the rows16 layout
constexpr int kActivationGroup = 64;  // activation group where weight scales are per row
constexpr int kPartialSums = 16;      // element i of a float dot product goes to partial sum i mod 16

// Bytes of a rows16 matrix (quant.py draws the layout). int4: a record holds one row block's part of a group, then its 16
// scales, of four bytes (float32) or two (float16). int8: a row block is 16 float32 scales, then its groups.
// static: files compiled for different instruction sets share no code.
static constexpr int64_t int4_record_bytes(int64_t group, int64_t scale_bytes) {
    return kRowBlock * group / 2 + kRowBlock * scale_bytes;
}
static constexpr int64_t int8_block_bytes(int64_t groups) { return kRowBlock * 4 + groups * kRowBlock * kActivationGroup; }

// The exact value of a float16 (IEEE 754 binary16); of any NaN, a quiet one.
float float_of_half(uint16_t half);

// n positions of quantised activations. Groups are padded to `group` elements with q = 0.
struct QuantizedActivations {
    const int8_t* q = nullptr;      // [n][groups * group]
    const float* scales = nullptr;  // [n][groups]
    const int32_t* sums = nullptr;  // [n][groups], sum of a group's q: the offset of the unsigned weights
    int64_t n = 0;
    int64_t groups = 0;
    int64_t group = 0;  // a multiple of 8
};

struct Kernels {
    const char* name;

    // s = max|x| / 127; q = clip(rint(x / s), -127, 127); max|x| < 1e-30 gives s = 0, q = 0. One row of `cols` values.
    // Returns the index of the first non-finite value, the outputs being undefined then, or -1.
    int64_t (*quantize)(const float* x, int64_t cols, int64_t group, int8_t* q, float* scales, int32_t* sums);

    // y[p * y_stride + r] = sum over groups, one by one, of float(isum) * (scale_w * scale_x), for the rows of the row
    // blocks [block_begin, block_end); rows at and past `rows` are not written. `w` points at block 0.
    void (*matmul_int4)(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x,
                        float* y, int64_t y_stride);
    // The same with float16 scales, each converted exactly.
    void (*matmul_int4_f16)(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x,
                            float* y, int64_t y_stride);
    void (*matmul_int8)(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x,
                        float* y, int64_t y_stride);

    // float32 values of one row block of a rows16 matrix: out[r * out_stride + i] for i < cols.
    void (*dequantize_int4_block)(const uint8_t* block, int64_t cols, int64_t group, float* out, int64_t out_stride);
    void (*dequantize_int4_f16_block)(const uint8_t* block, int64_t cols, int64_t group, float* out, int64_t out_stride);
    void (*dequantize_int8_block)(const uint8_t* block, int64_t cols, float* out, int64_t out_stride);
    // float32 values of one row in the row-major layout. group 0: one scale.
    void (*dequantize_int4_row)(const uint8_t* row, const float* scales, int64_t cols, int64_t group, float* out);
    void (*dequantize_int8_row)(const int8_t* row, float scale, int64_t cols, float* out);

    // Sum of a[i] * b[i] in 16 partial sums (i mod 16, each in order), joined by halving: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
    float (*dot)(const float* a, const float* b, int64_t n);
    // The same in float64 (products of float32 are exact there); the router's logits.
    double (*dot_f64)(const float* a, const float* b, int64_t n);
    // y[c] = sum over r of x[r] * w[r * w_stride + c], in 16 partial sums by r mod 16, joined by halving.
    void (*dot_columns)(const float* w, int64_t w_stride, int64_t rows, int64_t cols, const float* x, float* y);
    // y[i] += a * x[i].
    void (*axpy)(float a, const float* x, int64_t n, float* y);

    // y = x * (1 / sqrt(mean(x^2) + eps)) * w; the sum of squares as in dot.
    void (*rms_norm)(const float* x, const float* w, float eps, int64_t n, float* y);
    // y = (x - mean) * (1 / sqrt(mean((x - mean)^2) + eps)) * w + b; sums as in dot.
    void (*layer_norm)(const float* x, const float* w, const float* b, float eps, int64_t n, float* y);
    // In place: x = exp(x - max) / sum, the sum one by one in index order.
    void (*softmax)(float* x, int64_t n);
    // Exclusive or of all bytes taken as 64-bit little-endian words (the last one filled up with zeros), by the widest loads there
    // are: the rate at which memory can be read, which benchmarks hold kernels against.
    uint64_t (*xor_words)(const uint8_t* bytes, int64_t n);
    // y = gate / (1 + exp(-gate)) * up, exp being the engine's own polynomial.
    void (*silu_mul)(const float* gate, const float* up, int64_t n, float* y);
};

// Instruction sets of this build and processor, slowest ("scalar") first.
std::vector<std::string> available_isas();
// Tables that only a build for tests has. They are slow and emulate instructions that this processor may lack.
std::vector<std::string> emulated_isas();
// The table of any of these; "" gives the last of the available ones. Throws Error("OptionError").
const Kernels& kernels_for(const std::string& isa);
// Why "amx" is not among the available ones; "" if it is. The first call of any of these functions asks the operating system
// for the tile registers, for the whole process.
std::string amx_refusal();

}  // namespace colibri
