// Python's view of the routing part.
#include "bindings.h"

namespace colibri::bindings {

void bind_routing(pybind11::module_&) {}

}  // namespace colibri::bindings
