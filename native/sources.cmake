# Every native source, by the instruction set that it may use. One line each, sorted within a part.
set(COLIBRI_SOURCES
    # kernels
    src/kernels/dispatch.cpp
    src/kernels/scalar/floats.cpp
    src/kernels/scalar/quantized.cpp
    src/kernels/scalar/table.cpp
    # routing
    # io and cache
    # model
)
set(COLIBRI_AVX2_SOURCES
    src/kernels/avx2/dequantize.cpp
    src/kernels/avx2/floats.cpp
    src/kernels/avx2/quantized.cpp
    src/kernels/avx2/table.cpp
)
set(COLIBRI_AVX512_SOURCES
    src/kernels/avx512/dequantize.cpp
    src/kernels/avx512/floats.cpp
    src/kernels/avx512/quantized.cpp
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
