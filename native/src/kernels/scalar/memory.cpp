// Scalar reading of memory, word by word.
#define COLIBRI_ISA scalar
#include "../parts.h"

namespace colibri::scalar {

uint64_t xor_words(const uint8_t* bytes, int64_t n) {
    uint64_t sum = 0, word = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __builtin_memcpy(&word, bytes + i, 8);
        sum ^= word;
    }
    for (int shift = 0; i < n; ++i, shift += 8) sum ^= static_cast<uint64_t>(bytes[i]) << shift;
    return sum;
}

}  // namespace colibri::scalar
