# Every native source, by the instruction set that it may use. One line each, sorted within a part.
set(COLIBRI_SOURCES
    # kernels
    src/kernels/dispatch.cpp
    src/kernels/scalar/table.cpp
    # routing
    # io and cache
    src/cache/expert_store.cpp
    src/cache/geometry.cpp
    src/cache/walk.cpp
    src/io/faults.cpp
    src/io/file_set.cpp
    src/io/pread_pool.cpp
    src/io/read_plan.cpp
    src/io/repack.cpp
    # model
)
set(COLIBRI_AVX2_SOURCES
    src/kernels/avx2/table.cpp
)
set(COLIBRI_AVX512_SOURCES
    src/kernels/avx512/table.cpp
)
set(COLIBRI_BINDING_SOURCES
    src/bindings/cache.cpp
    src/bindings/engine.cpp
    src/bindings/errors.cpp
    src/bindings/kernels.cpp
    src/bindings/module.cpp
    src/bindings/routing.cpp
)
