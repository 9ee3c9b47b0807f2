// Kernel table of the scalar kernels: the definition that every other table equals bit for bit.
#define COLIBRI_ISA scalar
#include "../parts.h"

namespace colibri::scalar {

const Kernels table = {
    .name = "scalar",
    .quantize = quantize,
    .matmul_int4 = matmul_int4,
    .matmul_int4_f16 = matmul_int4_f16,
    .matmul_int8 = matmul_int8,
    .dequantize_int4_block = dequantize_int4_block,
    .dequantize_int4_f16_block = dequantize_int4_f16_block,
    .dequantize_int8_block = dequantize_int8_block,
    .dequantize_int4_row = dequantize_int4_row,
    .dequantize_int8_row = dequantize_int8_row,
    .dot = dot,
    .dot_f64 = dot_f64,
    .dot_columns = dot_columns,
    .axpy = axpy,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .softmax = softmax,
    .xor_words = xor_words,
    .silu_mul = silu_mul,
};

}  // namespace colibri::scalar
