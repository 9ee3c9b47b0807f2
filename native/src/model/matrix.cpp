// Products of weights in memory with a step's activations; defined by reference/quantized.py.
#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "colibri/error.h"

namespace colibri {

MatrixView view_of(const StoredMatrix& m, const uint8_t* data) {
    const int64_t group = m.bits == 4 && m.group_size ? m.group_size : kActivationGroup;
    return {m.rows, m.cols, m.bits, group, m.scale_bytes, data};
}

ProductKernel product_kernel(const Kernels& kernels, const MatrixView& w) {
    if (w.bits == 8) return kernels.matmul_int8;
    return w.scale_bytes == 2 ? kernels.matmul_int4_f16 : kernels.matmul_int4;
}

void Activations::set(const float* x, int64_t n, int64_t cols, const char* what, const std::vector<int32_t>* positions) {
    x_ = x;
    n_ = n;
    cols_ = cols;
    what_ = what;
    positions_ = positions;
    ready_ = false;
}

void Activations::reserve(int64_t group) {
    view_.n = n_;
    view_.group = group;
    view_.groups = (cols_ + group - 1) / group;
    q_.reserve(n_ * view_.groups * group);
    scales_.reserve(n_ * view_.groups);
    sums_.reserve(n_ * view_.groups);
    view_.q = q_.data();
    view_.scales = scales_.data();
    view_.sums = sums_.data();
}

const QuantizedActivations& Activations::quantised(Products& products, int64_t group) {
    if (ready_ && view_.group == group) return view_;
    reserve(group);
    for (int64_t i = 0; i < n_; ++i) {
        const int64_t bad = products.kernels().quantize(x_ + i * cols_, cols_, group, q_.data() + i * view_.groups * group,
                                                        scales_.data() + i * view_.groups, sums_.data() + i * view_.groups);
        if (bad >= 0)
            throw Error("NonFiniteActivationError", "a value entering a quantised product is not finite",
                        std::string(what_) + ", position " + std::to_string(positions_ ? (*positions_)[i] : i) +
                            " of the step, element " + std::to_string(bad),
                        "a finite value", std::to_string(x_[i * cols_ + bad]));
    }
    ready_ = true;
    if (products.trace) {
        TracedInput input{products.trace_layer, what_, cols_, {}, {x_, x_ + n_ * cols_}};
        if (positions_) {
            input.rows = *positions_;
        } else {
            input.rows.resize(n_);
            std::iota(input.rows.begin(), input.rows.end(), 0);
        }
        products.trace->inputs.push_back(std::move(input));
    }
    return view_;
}

void Activations::gather(Activations& from, const std::vector<int32_t>& positions, Products& products, int64_t group) {
    const int64_t n = static_cast<int64_t>(positions.size());
    if (!products.quantised() || !group) {
        gathered_.reserve(n * from.cols_);
        for (int64_t i = 0; i < n; ++i)
            std::memcpy(gathered_.data() + i * from.cols_, from.x_ + positions[i] * from.cols_, from.cols_ * sizeof(float));
        set(gathered_.data(), n, from.cols_, from.what_, &positions);
        return;
    }
    const QuantizedActivations& source = from.quantised(products, group);
    set(nullptr, n, from.cols_, from.what_, &positions);
    reserve(group);
    const int64_t groups = view_.groups;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t p = positions[i];
        std::memcpy(q_.data() + i * groups * group, source.q + p * groups * group, groups * group);
        std::memcpy(scales_.data() + i * groups, source.scales + p * groups, groups * sizeof(float));
        std::memcpy(sums_.data() + i * groups, source.sums + p * groups, groups * sizeof(int32_t));
    }
    ready_ = true;
}

void Products::multiply(const MatrixView& w, Activations& x, float* y, int64_t y_stride) {
    if (!quantised_) {
        multiply_float(w, x, y, y_stride);
        return;
    }
    const QuantizedActivations& q = x.quantised(*this, w.group);
    const ProductKernel kernel = product_kernel(kernels_, w);
    pool_.parallel_for(w.blocks(), w.blocks() * w.block_bytes() * x.n(),
                       [&](int64_t begin, int64_t end, int) { kernel(w.data, w.rows, begin, end, q, y, y_stride); });
}

void Products::multiply_float(const MatrixView& w, const Activations& x, float* y, int64_t y_stride) {
    pool_.parallel_for(w.blocks(), w.rows * w.cols * x.n(), [&](int64_t begin, int64_t end, int thread) {
        Buffer<float>& rows = scratch_[thread];
        rows.reserve(kRowBlock * w.cols);
        for (int64_t block = begin; block < end; ++block) {
            const uint8_t* bytes = w.data + block * w.block_bytes();
            if (w.bits == 8)
                kernels_.dequantize_int8_block(bytes, w.cols, rows.data(), w.cols);
            else
                (w.scale_bytes == 2 ? kernels_.dequantize_int4_f16_block : kernels_.dequantize_int4_block)(bytes, w.cols, w.group,
                                                                                                           rows.data(), w.cols);
            const int64_t first = block * kRowBlock, count = std::min<int64_t>(kRowBlock, w.rows - first);
            for (int64_t p = 0; p < x.n(); ++p)
                for (int64_t r = 0; r < count; ++r)
                    y[p * y_stride + first + r] = kernels_.dot(rows.data() + r * w.cols, x.x() + p * x.cols(), w.cols);
        }
    });
}

}  // namespace colibri
