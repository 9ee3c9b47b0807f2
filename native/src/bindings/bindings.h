// One function per part of the engine that Python can reach; each adds its names to the module.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "colibri/routing.h"

namespace colibri {
struct ReadHooks;
}

namespace colibri::bindings {

// Throws Error("OptionError") naming the policies that there are.
Policy policy_named(const std::string& name);

void bind_errors(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_routing(pybind11::module_& module);
void bind_cache(pybind11::module_& module);
void bind_engine(pybind11::module_& module);

// Reads that go wrong as dictionaries say: kind, file, offset, bytes, times (io/faults.h). For tests.
std::shared_ptr<ReadHooks> faulty_reads(const std::vector<pybind11::dict>& faults, bool reverse_completions);

}  // namespace colibri::bindings
