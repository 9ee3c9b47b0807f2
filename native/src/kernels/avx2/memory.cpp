// AVX2 reading of memory: four registers at a time, fetched ahead.
#include <immintrin.h>

#define COLIBRI_ISA avx2
#include "../parts.h"

namespace colibri::avx2 {

namespace {

constexpr int64_t kStep = 128;
constexpr int64_t kPrefetchBytes = 4608;

inline __m256i load256(const uint8_t* bytes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)); }

}  // namespace

uint64_t xor_words(const uint8_t* bytes, int64_t n) {
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
        _mm_prefetch(reinterpret_cast<const char*>(bytes + i) + kPrefetchBytes, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(bytes + i) + kPrefetchBytes + 64, _MM_HINT_T0);
        for (int k = 0; k < 4; ++k) sums[k] = _mm256_xor_si256(sums[k], load256(bytes + i + 32 * k));
    }
    const __m256i sum = _mm256_xor_si256(_mm256_xor_si256(sums[0], sums[1]), _mm256_xor_si256(sums[2], sums[3]));
    uint64_t words[4], rest = 0;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), sum);
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        __builtin_memcpy(&word, bytes + i, 8);
        rest ^= word;
    }
    for (int shift = 0; i < n; ++i, shift += 8) rest ^= static_cast<uint64_t>(bytes[i]) << shift;
    return words[0] ^ words[1] ^ words[2] ^ words[3] ^ rest;
}

}  // namespace colibri::avx2
