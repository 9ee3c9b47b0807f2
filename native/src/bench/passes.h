// Timed passes over memory, for benchmarks: how fast it can be read, and how fast products with weights in it go.
#pragma once

#include <cstdint>

#include "../model/matrix.h"
#include "../model/thread_pool.h"
#include "colibri/kernels.h"

namespace colibri {

// Each thread reads one stretch of `bytes` bytes; the exclusive or of all 64-bit words goes to `sum`. Returns seconds.
double read_pass(const Kernels& kernels, ThreadPool& pool, const uint8_t* data, int64_t bytes, uint64_t* sum);

// `count` matrices of the form of `first` that lie one after the other, each times the same activations, as the engine does it:
// every matrix is split between the threads. y [positions][rows] is that of the last one. Returns seconds.
double product_pass(const Kernels& kernels, ThreadPool& pool, const MatrixView& first, int64_t count, const QuantizedActivations& x,
                    float* y);

}  // namespace colibri
