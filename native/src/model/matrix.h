// Weights in memory and their products with a step's activations.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "buffer.h"
#include "colibri/engine.h"
#include "colibri/kernels.h"
#include "thread_pool.h"

namespace colibri {

// A quantised matrix in rows16 bytes; a view, the bytes belong to a Weights or to an ExpertLease.
struct MatrixView {
    int64_t rows = 0, cols = 0;
    int bits = 4;
    int64_t group = kActivationGroup;
    int scale_bytes = 4;
    const uint8_t* data = nullptr;

    int64_t groups() const { return (cols + group - 1) / group; }
    int64_t block_bytes() const {
        return bits == 4 ? groups() * int4_record_bytes(group, scale_bytes) : int8_block_bytes(groups());
    }
    int64_t blocks() const { return (rows + kRowBlock - 1) / kRowBlock; }
};

// The view of rows16 bytes of a matrix.
MatrixView view_of(const StoredMatrix& matrix, const uint8_t* data);

using ProductKernel = decltype(Kernels::matmul_int4);
// The kernel for the format of a matrix.
ProductKernel product_kernel(const Kernels& kernels, const MatrixView& w);

// The form in which a dense tensor stays in memory.
enum class Resident {
    rows16,     // products with quantised activations (or, in w4a32, dequantised block by block)
    row_major,  // dequantised row by row
    f32,
};

// The form of a tensor by its role.
Resident resident_form(const std::string& role);

// A dense tensor in memory.
class Weights {
  public:
    Weights() = default;
    // Reads a tensor from its file. `role` names it in errors. Throws Error("NonFiniteWeightError") for a value or scale.
    Weights(const std::string& role, const StoredMatrix& stored, Resident form, const std::vector<std::string>& files);

    static int64_t memory_bytes(const StoredMatrix& stored, Resident form);

    MatrixView view() const;
    const float* f32() const { return reinterpret_cast<const float*>(data_.data()); }
    // float32 values of one row of a row_major (or f32) tensor.
    void row(const Kernels& kernels, int64_t row, float* out) const;
    int64_t rows() const { return stored_.rows; }
    int64_t cols() const { return stored_.cols; }
    bool empty() const { return data_.size() == 0; }

  private:
    void read_repacked(const std::vector<std::string>& files);
    void read_dequantised(const std::vector<std::string>& files);
    void check_inner_scales(const std::vector<std::string>& files) const;

    StoredMatrix stored_;
    Buffer<uint8_t> data_;
    Buffer<float> scales_;
};

class Products;

// n rows of float32 inputs, quantised once per group size when first needed.
class Activations {
  public:
    // Rows are contiguous. `what` names them in errors and traces; `positions` are theirs in the step, null: 0 … n - 1.
    void set(const float* x, int64_t n, int64_t cols, const char* what, const std::vector<int32_t>* positions = nullptr);
    const float* x() const { return x_; }
    int64_t n() const { return n_; }
    int64_t cols() const { return cols_; }
    const std::vector<int32_t>* positions() const { return positions_; }
    const QuantizedActivations& quantised(Products& products, int64_t group);
    // The rows of `from` that `positions` lists. Quantised in groups of `group`, what is there already is copied, not made
    // again; with group 0 the floats are copied, for products of several group sizes.
    void gather(Activations& from, const std::vector<int32_t>& positions, Products& products, int64_t group);

  private:
    void reserve(int64_t group);

    const float* x_ = nullptr;
    int64_t n_ = 0, cols_ = 0;
    const char* what_ = "";
    const std::vector<int32_t>* positions_ = nullptr;
    bool ready_ = false;
    QuantizedActivations view_;
    Buffer<int8_t> q_;
    Buffer<float> scales_;
    Buffer<int32_t> sums_;
    Buffer<float> gathered_;
};

// Products on the pool's threads; y is [n][y_stride].
class Products {
  public:
    Products(const Kernels& kernels, ThreadPool& pool, bool quantised_activations)
        : kernels_(kernels), pool_(pool), quantised_(quantised_activations), scratch_(pool.threads()) {}

    const Kernels& kernels() const { return kernels_; }
    ThreadPool& pool() { return pool_; }
    bool quantised() const { return quantised_; }

    void multiply(const MatrixView& w, Activations& x, float* y, int64_t y_stride);

    // Where quantiser inputs are recorded, and the layer that they belong to; null: nowhere.
    Trace* trace = nullptr;
    int64_t trace_layer = 0;

  private:
    void multiply_float(const MatrixView& w, const Activations& x, float* y, int64_t y_stride);

    const Kernels& kernels_;
    ThreadPool& pool_;
    bool quantised_;
    std::vector<Buffer<float>> scratch_;  // one dequantised row block per thread
};

}  // namespace colibri
