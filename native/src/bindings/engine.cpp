// Python's view of the engine part.
#include "bindings.h"

namespace colibri::bindings {

void bind_engine(pybind11::module_&) {}

}  // namespace colibri::bindings
