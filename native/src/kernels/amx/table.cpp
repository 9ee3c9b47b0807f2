// Kernel table of amx: products with many positions are its own, everything else is avx512vnni's.
#define COLIBRI_ISA avx512
#include "../parts.h"
#include "products.h"

namespace colibri::COLIBRI_AMX {

const Kernels table = {
    .name = COLIBRI_AMX_NAME,
    .quantize = avx512::quantize,
    .matmul_int4 = matmul_int4,
    .matmul_int4_f16 = matmul_int4_f16,
    .matmul_int8 = matmul_int8,
    .dequantize_int4_block = avx512::dequantize_int4_block,
    .dequantize_int4_f16_block = avx512::dequantize_int4_f16_block,
    .dequantize_int8_block = avx512::dequantize_int8_block,
    .dequantize_int4_row = avx512::dequantize_int4_row,
    .dequantize_int8_row = avx512::dequantize_int8_row,
    .dot = avx512::dot,
    .dot_f64 = avx512::dot_f64,
    .dot_columns = avx512::dot_columns,
    .axpy = avx512::axpy,
    .rms_norm = avx512::rms_norm,
    .layer_norm = avx512::layer_norm,
    .softmax = avx512::softmax,
    .xor_words = avx512::xor_words,
    .silu_mul = avx512::silu_mul,
};

}  // namespace colibri::COLIBRI_AMX
