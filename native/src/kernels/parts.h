// The functions that every instruction set implements, declared in namespace colibri::COLIBRI_ISA.
//
// A file of kernels/<isa> defines COLIBRI_ISA and includes this. Nothing here has a body: files compiled for different
// instruction sets must share no inline code, or the linker may keep the copy that this processor cannot run.
#pragma once

#include "colibri/kernels.h"

namespace colibri::COLIBRI_ISA {

extern const Kernels table;

int64_t quantize(const float* x, int64_t cols, int64_t group, int8_t* q, float* scales, int32_t* sums);

void matmul_int4(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                 int64_t y_stride);
void matmul_int4_f16(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x,
                     float* y, int64_t y_stride);
void matmul_int8(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                 int64_t y_stride);

void dequantize_int4_block(const uint8_t* block, int64_t cols, int64_t group, float* out, int64_t out_stride);
void dequantize_int4_f16_block(const uint8_t* block, int64_t cols, int64_t group, float* out, int64_t out_stride);
void dequantize_int8_block(const uint8_t* block, int64_t cols, float* out, int64_t out_stride);
void dequantize_int4_row(const uint8_t* row, const float* scales, int64_t cols, int64_t group, float* out);
void dequantize_int8_row(const int8_t* row, float scale, int64_t cols, float* out);

float dot(const float* a, const float* b, int64_t n);
double dot_f64(const float* a, const float* b, int64_t n);
void dot_columns(const float* w, int64_t w_stride, int64_t rows, int64_t cols, const float* x, float* y);
void axpy(float a, const float* x, int64_t n, float* y);

void rms_norm(const float* x, const float* w, float eps, int64_t n, float* y);
void layer_norm(const float* x, const float* w, const float* b, float eps, int64_t n, float* y);
void softmax(float* x, int64_t n);
void silu_mul(const float* gate, const float* up, int64_t n, float* y);

uint64_t xor_words(const uint8_t* bytes, int64_t n);

}  // namespace colibri::COLIBRI_ISA
