// Passes over memory and their times.
#include "passes.h"

#include <chrono>
#include <vector>

namespace colibri {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

}  // namespace

double read_pass(const Kernels& kernels, ThreadPool& pool, const uint8_t* data, int64_t bytes, uint64_t* sum) {
    struct alignas(64) Share {
        uint64_t sum = 0;
    };
    std::vector<Share> shares(static_cast<size_t>(pool.threads()));
    const int64_t words = (bytes + 7) / 8;
    const auto begin = Clock::now();
    pool.parallel_for(words, bytes, [&](int64_t from, int64_t to, int thread) {
        const int64_t end = to == words ? bytes : to * 8;
        shares[static_cast<size_t>(thread)].sum ^= kernels.xor_words(data + from * 8, end - from * 8);
    });
    const double seconds = since(begin);
    *sum = 0;
    for (const Share& share : shares) *sum ^= share.sum;
    return seconds;
}

double product_pass(const Kernels& kernels, ThreadPool& pool, const MatrixView& first, int64_t count, const QuantizedActivations& x,
                    float* y) {
    const ProductKernel kernel = product_kernel(kernels, first);
    const int64_t matrix_bytes = first.blocks() * first.block_bytes();
    const auto begin = Clock::now();
    for (int64_t i = 0; i < count; ++i)
        pool.parallel_for(first.blocks(), matrix_bytes * x.n, [&](int64_t from, int64_t to, int) {
            kernel(first.data + i * matrix_bytes, first.rows, from, to, x, y, first.rows);
        });
    return since(begin);
}

}  // namespace colibri
