// What kernels/amx defines, in namespace colibri::COLIBRI_AMX: `amx`, or `amx_emulated` for tests (tiles.h).
#pragma once

#include "colibri/kernels.h"

namespace colibri::COLIBRI_AMX {

extern const Kernels table;

void matmul_int4(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                 int64_t y_stride);
void matmul_int4_f16(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x,
                     float* y, int64_t y_stride);
void matmul_int8(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                 int64_t y_stride);

}  // namespace colibri::COLIBRI_AMX
