// Python's view of the readers.
#include <pybind11/stl.h>

#include "../io/read_blocks.h"
#include "bindings.h"

namespace py = pybind11;

namespace colibri::bindings {

ReaderKind reader_named(const std::string& name) {
    return named<ReaderKind>("reader", name,
                             {{"auto", ReaderKind::automatic}, {"pread", ReaderKind::pread}, {"uring", ReaderKind::uring}});
}

namespace {

py::dict read_blocks_of(const std::string& path, const std::vector<uint64_t>& offsets, uint64_t length, bool direct,
                        const std::string& reader, int depth, bool checksums) {
    const ReaderKind kind = reader_named(reader);
    BlockReads done;
    {
        const py::gil_scoped_release release;
        done = read_blocks(path, offsets, length, direct, kind, depth, checksums);
    }
    py::dict d;
    d["seconds"] = done.seconds;
    d["bytes"] = done.transferred;
    d["retries"] = done.retries;
    d["reader"] = done.reader;
    d["checksums"] = done.checksums;
    return d;
}

}  // namespace

void bind_io(py::module_& module) {
    module.def("uring_refusal", &uring_refusal, "Why the kernel refuses io_uring; empty where it does not.");
    module.def("read_blocks", &read_blocks_of, py::arg("path"), py::arg("offsets"), py::arg("length"), py::kw_only(),
               py::arg("direct"), py::arg("reader"), py::arg("depth"), py::arg("checksums") = false,
               "Reads `length` bytes at each offset, in order, `depth` at a time: seconds, bytes, retries, reader and, where asked "
               "for, the sum of (2 i + 1) * word i of each block.");
}

}  // namespace colibri::bindings
