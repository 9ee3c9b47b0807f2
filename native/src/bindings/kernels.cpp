// The kernels by instruction set, on NumPy arrays: colibri_jax._native.kernels. For tests and benchmarks; the engine calls
// the tables directly. Outputs are arrays of the caller, written in place. Every array must be C-contiguous, of the exact
// dtype, and at least as long as the shape says (rows16 bytes exactly); anything else raises ShapeError before a kernel runs.
#include "colibri/kernels.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "colibri/error.h"

namespace py = pybind11;

namespace colibri::bindings {

namespace {

template <typename T>
void check(const py::array& array, const char* name, int64_t elements) {
    if (!py::dtype::of<T>().is(array.dtype()) || !(array.flags() & py::array::c_style) || array.size() < elements) {
        throw Error(
            "ShapeError", "kernel argument", name,
            "C-contiguous " + py::str(py::dtype::of<T>()).cast<std::string>() + ", " + std::to_string(elements) + " elements",
            py::str(array.dtype()).cast<std::string>() + ", " + std::to_string(array.size()) + " elements");
    }
}

template <typename T>
const T* input(const py::array& array, const char* name, int64_t elements) {
    check<T>(array, name, elements);
    return static_cast<const T*>(array.data());
}

template <typename T>
T* output(py::array& array, const char* name, int64_t elements) {
    check<T>(array, name, elements);
    if (!array.writeable()) throw Error("ShapeError", "kernel output", name, "writeable", "read-only");
    return static_cast<T*>(array.mutable_data());
}

void require(bool holds, const char* name, const char* expected, int64_t got) {
    if (!holds) throw Error("ShapeError", "kernel argument", name, expected, std::to_string(got));
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_group(int64_t group) { require(group >= 8 && group % 8 == 0, "group", "a positive multiple of 8", group); }

// An output of `rows` rows that lie `stride` apart, `cols` values each.
int64_t extent(int64_t rows, int64_t stride, int64_t cols) { return rows > 0 ? (rows - 1) * stride + cols : 0; }

void quantize(const std::string& isa, const py::array& x, int64_t cols, int64_t group, py::array q, py::array scales,
              py::array sums) {
    const Kernels& kernels = kernels_for(isa);
    check_group(group);
    require(cols >= 0, "cols", "not negative", cols);
    const int64_t groups = ceil_div(cols, group);
    const float* x_data = input<float>(x, "x", cols);
    int8_t* q_data = output<int8_t>(q, "q", groups * group);
    float* scale_data = output<float>(scales, "scales", groups);
    int32_t* sum_data = output<int32_t>(sums, "sums", groups);
    int64_t bad = -1;
    {
        py::gil_scoped_release release;
        bad = kernels.quantize(x_data, cols, group, q_data, scale_data, sum_data);
    }
    if (bad >= 0) {
        throw Error("NonFiniteActivationError", "activation is not finite", "element " + std::to_string(bad), "a finite value",
                    std::to_string(x_data[bad]));
    }
}

enum class Weight { int4, int4_f16, int8 };

int64_t block_bytes_of(Weight weight, int64_t groups, int64_t group) {
    if (weight == Weight::int8) return int8_block_bytes(groups);
    return groups * int4_record_bytes(group, weight == Weight::int4 ? 4 : 2);
}

// q [n, groups * group] decides n and groups.
template <Weight kWeight>
void matmul(const std::string& isa, const py::array& w, int64_t rows, int64_t block_begin, int64_t block_end, int64_t group,
            const py::array& q, const py::array& scales, const py::array& sums, py::array y, int64_t y_stride) {
    const Kernels& kernels = kernels_for(isa);
    check_group(group);
    require(kWeight != Weight::int8 || group == kActivationGroup, "group", "64 with int8 weights", group);
    require(q.ndim() == 2 && q.shape(1) % group == 0, "q", "two dimensions, whole groups", q.ndim());
    const int64_t n = q.shape(0), groups = q.shape(1) / group, blocks = ceil_div(rows, kRowBlock);
    require(rows >= 0, "rows", "not negative", rows);
    require(0 <= block_begin && block_begin <= block_end && block_end <= blocks, "row blocks", "0 <= begin <= end <= blocks",
            block_end);
    require(n <= 1 || y_stride >= rows, "y_stride", "at least rows", y_stride);
    const int64_t block_bytes = block_bytes_of(kWeight, groups, group);
    require(w.size() == blocks * block_bytes, "w", "the bytes of the whole matrix", w.size());
    const uint8_t* w_data = input<uint8_t>(w, "w", blocks * block_bytes);
    const QuantizedActivations x{.q = input<int8_t>(q, "q", n * groups * group),
                                 .scales = input<float>(scales, "scales", n * groups),
                                 .sums = input<int32_t>(sums, "sums", n * groups),
                                 .n = n,
                                 .groups = groups,
                                 .group = group};
    float* y_data = output<float>(y, "y", extent(n, y_stride, rows));
    py::gil_scoped_release release;
    const auto kernel = kWeight == Weight::int8       ? kernels.matmul_int8
                        : kWeight == Weight::int4_f16 ? kernels.matmul_int4_f16
                                                      : kernels.matmul_int4;
    kernel(w_data, rows, block_begin, block_end, x, y_data, y_stride);
}

template <Weight kWeight>
void dequantize_block(const std::string& isa, const py::array& block, int64_t cols, int64_t group, py::array out,
                      int64_t out_stride) {
    const Kernels& kernels = kernels_for(isa);
    check_group(group);
    require(cols >= 0, "cols", "not negative", cols);
    require(out_stride >= cols, "out_stride", "at least cols", out_stride);
    const uint8_t* data = input<uint8_t>(block, "block", block_bytes_of(kWeight, ceil_div(cols, group), group));
    const auto kernel = kWeight == Weight::int4_f16 ? kernels.dequantize_int4_f16_block : kernels.dequantize_int4_block;
    kernel(data, cols, group, output<float>(out, "out", extent(kRowBlock, out_stride, cols)), out_stride);
}

void dequantize_int8_block(const std::string& isa, const py::array& block, int64_t cols, py::array out, int64_t out_stride) {
    const Kernels& kernels = kernels_for(isa);
    require(cols >= 0, "cols", "not negative", cols);
    require(out_stride >= cols, "out_stride", "at least cols", out_stride);
    const uint8_t* data = input<uint8_t>(block, "block", int8_block_bytes(ceil_div(cols, kActivationGroup)));
    kernels.dequantize_int8_block(data, cols, output<float>(out, "out", extent(kRowBlock, out_stride, cols)), out_stride);
}

void dequantize_int4_row(const std::string& isa, const py::array& row, const py::array& scales, int64_t cols, int64_t group,
                         py::array out) {
    const Kernels& kernels = kernels_for(isa);
    require(cols >= 0, "cols", "not negative", cols);
    require(group >= 0, "group", "not negative", group);
    const uint8_t* data = input<uint8_t>(row, "row", ceil_div(cols, 2));
    const float* scale_data = input<float>(scales, "scales", group > 0 ? ceil_div(cols, group) : 1);
    kernels.dequantize_int4_row(data, scale_data, cols, group, output<float>(out, "out", cols));
}

void dequantize_int8_row(const std::string& isa, const py::array& row, float scale, int64_t cols, py::array out) {
    const Kernels& kernels = kernels_for(isa);
    require(cols >= 0, "cols", "not negative", cols);
    kernels.dequantize_int8_row(input<int8_t>(row, "row", cols), scale, cols, output<float>(out, "out", cols));
}

float dot(const std::string& isa, const py::array& a, const py::array& b) {
    return kernels_for(isa).dot(input<float>(a, "a", 0), input<float>(b, "b", a.size()), a.size());
}

double dot_f64(const std::string& isa, const py::array& a, const py::array& b) {
    return kernels_for(isa).dot_f64(input<float>(a, "a", 0), input<float>(b, "b", a.size()), a.size());
}

void dot_columns(const std::string& isa, const py::array& w, int64_t w_stride, int64_t rows, int64_t cols, const py::array& x,
                 py::array y) {
    const Kernels& kernels = kernels_for(isa);
    require(rows >= 0 && cols >= 0, "rows, cols", "not negative", rows < cols ? rows : cols);
    require(w_stride >= cols, "w_stride", "at least cols", w_stride);
    const float* w_data = input<float>(w, "w", extent(rows, w_stride, cols));
    const float* x_data = input<float>(x, "x", rows);
    float* y_data = output<float>(y, "y", cols);
    py::gil_scoped_release release;
    kernels.dot_columns(w_data, w_stride, rows, cols, x_data, y_data);
}

void axpy(const std::string& isa, float a, const py::array& x, py::array y) {
    const Kernels& kernels = kernels_for(isa);
    kernels.axpy(a, input<float>(x, "x", 0), x.size(), output<float>(y, "y", x.size()));
}

void rms_norm(const std::string& isa, const py::array& x, const py::array& w, float eps, py::array y) {
    const Kernels& kernels = kernels_for(isa);
    kernels.rms_norm(input<float>(x, "x", 0), input<float>(w, "w", x.size()), eps, x.size(), output<float>(y, "y", x.size()));
}

void layer_norm(const std::string& isa, const py::array& x, const py::array& w, const py::array& b, float eps, py::array y) {
    const Kernels& kernels = kernels_for(isa);
    kernels.layer_norm(input<float>(x, "x", 0), input<float>(w, "w", x.size()), input<float>(b, "b", x.size()), eps, x.size(),
                       output<float>(y, "y", x.size()));
}

uint64_t xor_words(const std::string& isa, const py::array& data) {
    return kernels_for(isa).xor_words(input<uint8_t>(data, "data", 0), data.size());
}

void softmax(const std::string& isa, py::array x) { kernels_for(isa).softmax(output<float>(x, "x", 0), x.size()); }

void silu_mul(const std::string& isa, const py::array& gate, const py::array& up, py::array y) {
    const Kernels& kernels = kernels_for(isa);
    const int64_t n = gate.size();
    kernels.silu_mul(input<float>(gate, "gate", 0), input<float>(up, "up", n), n, output<float>(y, "y", n));
}

}  // namespace

void bind_kernels(py::module_& module) {
    py::module_ kernels = module.def_submodule("kernels", "One function per kernel; `isa` names the table (empty: the fastest).");
    kernels.def("available_isas", &available_isas);
    kernels.def("emulated_isas", &emulated_isas);
    kernels.def("amx_refusal", &amx_refusal);
    kernels.def("quantize", &quantize, py::arg("isa"), py::arg("x"), py::arg("cols"), py::arg("group"), py::arg("q"),
                py::arg("scales"), py::arg("sums"));
    for (const auto& [name, function] :
         {std::pair{"matmul_int4", &matmul<Weight::int4>}, std::pair{"matmul_int4_f16", &matmul<Weight::int4_f16>},
          std::pair{"matmul_int8", &matmul<Weight::int8>}}) {
        kernels.def(name, function, py::arg("isa"), py::arg("w"), py::arg("rows"), py::arg("block_begin"), py::arg("block_end"),
                    py::arg("group"), py::arg("q"), py::arg("scales"), py::arg("sums"), py::arg("y"), py::arg("y_stride"));
    }
    for (const auto& [name, function] : {std::pair{"dequantize_int4_block", &dequantize_block<Weight::int4>},
                                         std::pair{"dequantize_int4_f16_block", &dequantize_block<Weight::int4_f16>}}) {
        kernels.def(name, function, py::arg("isa"), py::arg("block"), py::arg("cols"), py::arg("group"), py::arg("out"),
                    py::arg("out_stride"));
    }
    kernels.def("dequantize_int8_block", &dequantize_int8_block, py::arg("isa"), py::arg("block"), py::arg("cols"), py::arg("out"),
                py::arg("out_stride"));
    kernels.def("dequantize_int4_row", &dequantize_int4_row, py::arg("isa"), py::arg("row"), py::arg("scales"), py::arg("cols"),
                py::arg("group"), py::arg("out"));
    kernels.def("dequantize_int8_row", &dequantize_int8_row, py::arg("isa"), py::arg("row"), py::arg("scale"), py::arg("cols"),
                py::arg("out"));
    kernels.def("dot", &dot, py::arg("isa"), py::arg("a"), py::arg("b"));
    kernels.def("dot_f64", &dot_f64, py::arg("isa"), py::arg("a"), py::arg("b"));
    kernels.def("dot_columns", &dot_columns, py::arg("isa"), py::arg("w"), py::arg("w_stride"), py::arg("rows"), py::arg("cols"),
                py::arg("x"), py::arg("y"));
    kernels.def("axpy", &axpy, py::arg("isa"), py::arg("a"), py::arg("x"), py::arg("y"));
    kernels.def("rms_norm", &rms_norm, py::arg("isa"), py::arg("x"), py::arg("w"), py::arg("eps"), py::arg("y"));
    kernels.def("layer_norm", &layer_norm, py::arg("isa"), py::arg("x"), py::arg("w"), py::arg("b"), py::arg("eps"), py::arg("y"));
    kernels.def("xor_words", &xor_words, py::arg("isa"), py::arg("data"));
    kernels.def("softmax", &softmax, py::arg("isa"), py::arg("x"));
    kernels.def("silu_mul", &silu_mul, py::arg("isa"), py::arg("gate"), py::arg("up"), py::arg("y"));
}

}  // namespace colibri::bindings
