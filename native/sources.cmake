# Every native source, by the instruction set that it may use. One line each, sorted within a part.
set(COLIBRI_SOURCES
    # kernels
    src/kernels/dispatch.cpp
    src/kernels/scalar/floats.cpp
    src/kernels/scalar/memory.cpp
    src/kernels/scalar/quantized.cpp
    src/kernels/scalar/table.cpp
    # routing
    src/routing/budget.cpp
    src/routing/exact_math.cpp
    src/routing/position.cpp
    src/routing/select.cpp
    # io and cache
    src/cache/expert_store.cpp
    src/cache/geometry.cpp
    src/cache/walk.cpp
    src/io/faults.cpp
    src/io/file_set.cpp
    src/io/make_reader.cpp
    src/io/pread_pool.cpp
    src/io/read_blocks.cpp
    src/io/read_plan.cpp
    src/io/read_progress.cpp
    src/io/repack.cpp
    src/io/ring.cpp
    src/io/uring_reader.cpp
    # benchmarks
    src/bench/passes.cpp
    # model
    src/model/attention.cpp
    src/model/check_spec.cpp
    src/model/engine.cpp
    src/model/gqa.cpp
    src/model/indexer.cpp
    src/model/matrix.cpp
    src/model/mla.cpp
    src/model/moe.cpp
    src/model/rope.cpp
    src/model/thread_pool.cpp
    src/model/weights.cpp
)
set(COLIBRI_AVX2_SOURCES
    src/kernels/avx2/dequantize.cpp
    src/kernels/avx2/floats.cpp
    src/kernels/avx2/memory.cpp
    src/kernels/avx2/quantized.cpp
    src/kernels/avx2/table.cpp
)
set(COLIBRI_AVX512_SOURCES
    src/kernels/avx512/dequantize.cpp
    src/kernels/avx512/floats.cpp
    src/kernels/avx512/memory.cpp
    src/kernels/avx512/quantized.cpp
    src/kernels/avx512/table.cpp
)
set(COLIBRI_BINDING_SOURCES
    src/bindings/bench.cpp
    src/bindings/cache.cpp
    src/bindings/engine.cpp
    src/bindings/errors.cpp
    src/bindings/io.cpp
    src/bindings/kernels.cpp
    src/bindings/module.cpp
    src/bindings/routing.cpp
)
