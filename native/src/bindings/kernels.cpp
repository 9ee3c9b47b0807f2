// Python's view of the kernels part.
#include "bindings.h"

namespace colibri::bindings {

void bind_kernels(pybind11::module_&) {}

}  // namespace colibri::bindings
