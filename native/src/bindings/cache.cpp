// Python's view of the cache part.
#include "bindings.h"

namespace colibri::bindings {

void bind_cache(pybind11::module_&) {}

}  // namespace colibri::bindings
