// From the row-major layout of a container to the rows16 layout that the kernels take. quant.py documents both.
#pragma once

#include <cstdint>

#include "colibri/expert_store.h"

namespace colibri {

// Bytes of the weight tensor and of the scale tensor of a matrix as its file holds it (scales: 0 with rows16).
// Throws Error("UnknownFormatError") for a width or group size that no layout has, Error("ShapeError") for an empty shape
// or one whose byte count might not fit.
int64_t stored_weight_bytes(const StoredMatrix& matrix);
int64_t stored_scale_bytes(const StoredMatrix& matrix);

// Bytes of the matrix in rows16: rows padded to 16, cols to groups, scales inside. int4 rows take groups of 64.
int64_t rows16_bytes(const StoredMatrix& matrix);

// Writes rows16_bytes(matrix) bytes to `out`, every one of them. `weights` and `scales` (float32) are the row-major tensors
// at any alignment. Defined by quant.pack(quant.interleavable(matrix), "rows16").
void repack_rows16(const StoredMatrix& matrix, const uint8_t* weights, const uint8_t* scales, uint8_t* out);

}  // namespace colibri
