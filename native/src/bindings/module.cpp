// The module colibri_jax._native: composition only, no logic.
#include "bindings.h"

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native engine of colibri_jax. Private: use colibri_jax.native.";
    colibri::bindings::bind_errors(module);
    colibri::bindings::bind_kernels(module);
    colibri::bindings::bind_routing(module);
    colibri::bindings::bind_io(module);
    colibri::bindings::bind_cache(module);
    colibri::bindings::bind_engine(module);
    colibri::bindings::bind_bench(module);
}
