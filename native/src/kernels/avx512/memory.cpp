// AVX-512 reading of memory: four registers at a time, fetched ahead.
#include <immintrin.h>

#define COLIBRI_ISA avx512
#include "../parts.h"

namespace colibri::avx512 {

namespace {

constexpr int64_t kStep = 256;
constexpr int64_t kPrefetchBytes = 4608;

}  // namespace

uint64_t xor_words(const uint8_t* bytes, int64_t n) {
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
        for (int k = 0; k < 4; ++k) {
            _mm_prefetch(reinterpret_cast<const char*>(bytes + i + 64 * k) + kPrefetchBytes, _MM_HINT_T0);
            sums[k] = _mm512_xor_si512(sums[k], _mm512_loadu_si512(bytes + i + 64 * k));
        }
    }
    const __m512i sum = _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]), _mm512_xor_si512(sums[2], sums[3]));
    uint64_t words[8], total = 0;
    _mm512_storeu_si512(words, sum);
    for (const uint64_t word : words) total ^= word;
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        __builtin_memcpy(&word, bytes + i, 8);
        total ^= word;
    }
    for (int shift = 0; i < n; ++i, shift += 8) total ^= static_cast<uint64_t>(bytes[i]) << shift;
    return total;
}

}  // namespace colibri::avx512
