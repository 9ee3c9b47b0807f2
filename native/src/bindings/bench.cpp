// Timed passes for `colibri-jax bench`: colibri_jax._native.bench. Arrays as in bindings/kernels.cpp.
#include <pybind11/numpy.h>

#include "../bench/passes.h"
#include "bindings.h"
#include "colibri/error.h"

namespace py = pybind11;

namespace colibri::bindings {
namespace {

template <typename T>
const T* contiguous(const py::array& array, const char* name, int64_t elements) {
    if (!py::dtype::of<T>().is(array.dtype()) || !(array.flags() & py::array::c_style) || array.size() != elements)
        throw Error("ShapeError", "benchmark argument", name, std::to_string(elements) + " contiguous elements of its type",
                    std::to_string(array.size()));
    return static_cast<const T*>(array.data());
}

py::tuple read_memory(const std::string& isa, int threads, const py::array& data) {
    const Kernels& kernels = kernels_for(isa);
    ThreadPool pool(threads);
    const int64_t bytes = data.nbytes();
    const uint8_t* from = contiguous<uint8_t>(data, "data", data.size());
    uint64_t sum = 0;
    double seconds = 0;
    {
        const py::gil_scoped_release released;
        seconds = read_pass(kernels, pool, from, bytes, &sum);
    }
    return py::make_tuple(seconds, sum);
}

double products(const std::string& isa, int threads, int bits, int scale_bytes, int64_t rows, int64_t cols, int64_t group,
                int64_t count, const py::array& weights, const py::array& q, const py::array& scales, const py::array& sums,
                py::array y) {
    const Kernels& kernels = kernels_for(isa);
    if (rows < 1 || cols < 1 || count < 1 || group < 8 || group % 8 || (bits != 4 && (bits != 8 || group != kActivationGroup)) ||
        (scale_bytes != 4 && (scale_bytes != 2 || bits != 4)))
        throw Error("ShapeError", "benchmark argument", "rows, cols, count, group, bits, scale_bytes",
                    "1 or more; a multiple of 8 (64 with int8); 4 or 8; 4, or 2 with int4",
                    std::to_string(rows) + ", " + std::to_string(cols) + ", " + std::to_string(count) + ", " +
                        std::to_string(group) + ", " + std::to_string(bits) + ", " + std::to_string(scale_bytes));
    MatrixView first{rows, cols, bits, group, scale_bytes, nullptr};
    const int64_t groups = first.groups();
    const int64_t n = q.size() / (groups * group);
    first.data = contiguous<uint8_t>(weights, "weights", count * first.blocks() * first.block_bytes());
    const QuantizedActivations x{.q = contiguous<int8_t>(q, "q", n * groups * group),
                                 .scales = contiguous<float>(scales, "scales", n * groups),
                                 .sums = contiguous<int32_t>(sums, "sums", n * groups),
                                 .n = n,
                                 .groups = groups,
                                 .group = group};
    contiguous<float>(y, "y", n * rows);
    if (!y.writeable()) throw Error("ShapeError", "benchmark output", "y", "writeable", "read-only");
    float* out = static_cast<float*>(y.mutable_data());
    ThreadPool pool(threads);
    const py::gil_scoped_release released;
    return product_pass(kernels, pool, first, count, x, out);
}

}  // namespace

void bind_bench(py::module_& module) {
    py::module_ bench =
        module.def_submodule("bench", "Timed passes over memory; seconds are measured inside, threads started before.");
    bench.def("read_memory", &read_memory, py::arg("isa"), py::arg("threads"), py::arg("data"),
              "(seconds, exclusive or of all 64-bit words) of one pass over uint8 data.");
    bench.def("products", &products, py::arg("isa"), py::arg("threads"), py::arg("bits"), py::arg("scale_bytes"), py::arg("rows"),
              py::arg("cols"), py::arg("group"), py::arg("count"), py::arg("weights"), py::arg("q"), py::arg("scales"),
              py::arg("sums"), py::arg("y"),
              "Seconds of `count` rows16 matrices in a row, each times the same n positions; y float32 [n, rows] of the last.");
}

}  // namespace colibri::bindings
