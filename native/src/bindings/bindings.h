// One function per part of the engine that Python can reach; each adds its names to the module.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "colibri/error.h"
#include "colibri/expert_store.h"
#include "colibri/routing.h"

namespace colibri {
struct ReadFault;
class FaultyReads;
}  // namespace colibri

namespace colibri::bindings {

// The value that Python calls `name`. Throws Error("OptionError") naming those that there are.
template <typename Enum, size_t N>
Enum named(const char* field, const std::string& name, const std::pair<const char*, Enum> (&known)[N]) {
    std::string names;
    for (const auto& [candidate, value] : known) {
        if (name == candidate) return value;
        names += (names.empty() ? "" : ", ") + std::string(candidate);
    }
    throw Error("OptionError", std::string("unknown ") + field, field, names, name);
}

// Enums by the names that Python has for them. Throw Error("OptionError") naming those that there are.
Score score_named(const std::string& name);
Policy policy_named(const std::string& name);
Denominator denominator_named(const std::string& name);
Vote vote_named(const std::string& name);
ReaderKind reader_named(const std::string& name);
CachePolicy cache_policy_named(const std::string& name);

// The fields of colibri_jax.Selection.
pybind11::dict selection_dict(const Selection& selection);

template <typename T>
pybind11::array_t<T> to_array(const std::vector<T>& values, std::vector<pybind11::ssize_t> shape) {
    return pybind11::array_t<T>(std::move(shape), values.data());
}

void bind_errors(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_routing(pybind11::module_& module);
void bind_io(pybind11::module_& module);
void bind_cache(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_bench(pybind11::module_& module);

// Reads that go wrong as dictionaries say: kind, file, offset, bytes, times (io/faults.h). For tests.
ReadFault fault_from(const pybind11::dict& described);
std::shared_ptr<FaultyReads> faulty_reads(const std::vector<pybind11::dict>& faults, bool reverse_completions);

}  // namespace colibri::bindings
