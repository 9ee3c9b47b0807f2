// Row-major int4 groups, int4 rows and int8 rows become rows16.
#include "colibri/repack.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "colibri/error.h"

namespace colibri {
namespace {

static_assert(std::endian::native == std::endian::little, "the layouts are little-endian and are moved as words");

constexpr int64_t kRows = 16;           // rows of a block
constexpr int64_t kRowScaleGroup = 64;  // group where scales are per row
constexpr int64_t kVector = 64;         // bytes of a vector: 4 of each row
constexpr std::array<int64_t, 8> kGroupSizes = {16, 32, 48, 64, 96, 128, 192, 256};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t group_of(const StoredMatrix& m) { return m.group_size ? m.group_size : kRowScaleGroup; }

void check(const StoredMatrix& m) {
    const std::string where = m.weights.tensor;
    if (m.bits != 4 && m.bits != 8)
        throw Error("UnknownFormatError", "unknown weight width", where, "4 or 8", std::to_string(m.bits));
    const bool known = std::find(kGroupSizes.begin(), kGroupSizes.end(), m.group_size) != kGroupSizes.end();
    if (m.group_size && (m.bits != 4 || !known))
        throw Error("UnknownFormatError", "unknown group size", where, "one of quant.GROUP_SIZES with int4",
                    std::to_string(m.group_size));
    if (m.rows16 && m.bits == 4 && !m.group_size)
        throw Error("UnknownFormatError", "format has no interleaved layout", where, "int4 groups or int8 rows", "int4 rows");
    if (m.rows < 1 || m.cols < 1)
        throw Error("ShapeError", "empty matrix", where, "rows and columns",
                    std::to_string(m.rows) + " x " + std::to_string(m.cols));
}

// Eight nibbles e0 … e7 of four bytes in the order of a vector's row: byte k is e(k) low, e(4 + k) high. Two words at once.
uint64_t interleave_nibbles(uint64_t x) {
    x = (x & 0xFF0000FFFF0000FFu) | ((x & 0x00FF000000FF0000u) >> 8) | ((x & 0x0000FF000000FF00u) << 8);
    return (x & 0xF00FF00FF00FF00Fu) | ((x & 0x0F000F000F000F00u) >> 4) | ((x & 0x00F000F000F000F0u) << 4);
}

// One row's part of one int4 group: `group / 8` words of four bytes, each into its vector.
void scatter_int4(const uint8_t* src, int64_t group, uint8_t* out) {
    for (int64_t t = 0; t < group / 8; t += 2, src += 8, out += 2 * kVector) {
        uint64_t pair;
        std::memcpy(&pair, src, 8);
        pair = interleave_nibbles(pair);
        std::memcpy(out, &pair, 4);
        pair >>= 32;
        std::memcpy(out + kVector, &pair, 4);
    }
}

void repack_int4(const StoredMatrix& m, const uint8_t* weights, const uint8_t* scales, uint8_t* out) {
    const int64_t group = group_of(m), groups = ceil_div(m.cols, group), row_bytes = ceil_div(m.cols, 2);
    const int64_t record = kRows * group / 2 + kRows * 4;
    std::array<uint8_t, 128> tail;  // the last group of a row, filled up with nibbles 8
    for (int64_t block = 0; block * kRows < m.rows; ++block, out += groups * record) {
        for (int64_t r = 0; r < kRows; ++r) {
            const int64_t row = block * kRows + r;
            const uint8_t* src = weights + row * row_bytes;
            for (int64_t g = 0; g < groups; ++g) {
                uint8_t* into = out + g * record;
                const int64_t present = row < m.rows ? std::min(group, m.cols - g * group) : 0;
                if (present == group) {
                    scatter_int4(src + g * group / 2, group, into + 4 * r);
                } else {
                    tail.fill(0x88);
                    std::copy_n(src + (present ? g * group / 2 : 0), ceil_div(present, 2), tail.begin());
                    // An odd row ends in the middle of a byte, whose other nibble means nothing.
                    if (present % 2)
                        tail[static_cast<size_t>(present / 2)] =
                            static_cast<uint8_t>((tail[static_cast<size_t>(present / 2)] & 15) | 0x80);
                    scatter_int4(tail.data(), group, into + 4 * r);
                }
                uint8_t* scale = into + kRows * group / 2 + 4 * r;
                if (row < m.rows)
                    std::memcpy(scale, scales + 4 * (m.group_size ? row * groups + g : row), 4);
                else
                    std::memset(scale, 0, 4);
            }
        }
    }
}

void repack_int8(const StoredMatrix& m, const uint8_t* weights, const uint8_t* scales, uint8_t* out) {
    const int64_t words = ceil_div(m.cols, kRowScaleGroup) * kRowScaleGroup / 4;
    for (int64_t block = 0; block * kRows < m.rows; ++block, out += kRows * 4 + words * kVector) {
        for (int64_t r = 0; r < kRows; ++r) {
            const int64_t row = block * kRows + r;
            if (row < m.rows)
                std::memcpy(out + 4 * r, scales + 4 * row, 4);
            else
                std::memset(out + 4 * r, 0, 4);
            uint8_t* into = out + kRows * 4 + 4 * r;
            for (int64_t t = 0; t < words; ++t, into += kVector) {
                uint32_t word = 0;  // missing elements are zero weights
                const int64_t present = row < m.rows ? std::clamp<int64_t>(m.cols - 4 * t, 0, 4) : 0;
                if (present > 0) std::memcpy(&word, weights + row * m.cols + 4 * t, static_cast<size_t>(present));
                word ^= 0x80808080u;
                std::memcpy(into, &word, 4);
            }
        }
    }
}

}  // namespace

int64_t stored_weight_bytes(const StoredMatrix& m) {
    check(m);
    if (m.rows16) return rows16_bytes(m);
    return m.rows * (m.bits == 8 ? m.cols : ceil_div(m.cols, 2));
}

int64_t stored_scale_bytes(const StoredMatrix& m) {
    check(m);
    if (m.rows16) return 0;
    return 4 * m.rows * (m.group_size ? ceil_div(m.cols, m.group_size) : 1);
}

int64_t rows16_bytes(const StoredMatrix& m) {
    check(m);
    const int64_t blocks = ceil_div(m.rows, kRows), groups = ceil_div(m.cols, group_of(m));
    if (m.bits == 8) return blocks * (4 * kRows + groups * kRows * kRowScaleGroup);
    return blocks * groups * (kRows * group_of(m) / 2 + 4 * kRows);
}

void repack_rows16(const StoredMatrix& m, const uint8_t* weights, const uint8_t* scales, uint8_t* out) {
    (m.bits == 8 ? repack_int8 : repack_int4)(m, weights, scales, out);
}

}  // namespace colibri
