// One function per part of the engine that Python can reach; each adds its names to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace colibri::bindings {

void bind_errors(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_routing(pybind11::module_& module);
void bind_cache(pybind11::module_& module);
void bind_engine(pybind11::module_& module);

}  // namespace colibri::bindings
