// Turns colibri::Error into the Python class of the same name.
#include <system_error>

#include "bindings.h"
#include "colibri/error.h"

namespace py = pybind11;

namespace colibri::bindings {

namespace {

void raise(const Error& error) {
    const py::object type = py::module_::import("colibri_jax.errors").attr(error.kind.c_str());
    const py::object value =
        type(error.rule, py::arg("where") = error.where, py::arg("expected") = error.expected, py::arg("got") = error.got);
    PyErr_SetObject(type.ptr(), value.ptr());
}

}  // namespace

void bind_errors(py::module_&) {
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const Error& error) {
            raise(error);
        } catch (const std::system_error& error) {
            // A thread that could not be started, for one.
            raise(Error("EngineError", "the operating system refused a resource", {}, {}, error.what()));
        }
    });
}

}  // namespace colibri::bindings
