// Row-major int4 groups, int4 rows and int8 rows become rows16.
#include "colibri/repack.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "colibri/error.h"
#include "colibri/kernels.h"

namespace colibri {
namespace {

static_assert(std::endian::native == std::endian::little, "the layouts are little-endian and are moved as words");

constexpr int64_t kLargestSide = int64_t{1} << 30;  // byte counts of a matrix then fit into int64
constexpr int64_t kVector = 64;                     // bytes of a vector: 4 of each row
constexpr std::array<int64_t, 8> kGroupSizes = {16, 32, 48, 64, 96, 128, 192, 256};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t group_of(const StoredMatrix& m) { return m.group_size ? m.group_size : kActivationGroup; }

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
    if (m.scale_bytes != 4 && (m.scale_bytes != 2 || !m.rows16 || m.bits != 4))
        throw Error("UnknownFormatError", "unknown width of scales", where, "float32, or float16 with int4 in rows16",
                    std::to_string(m.scale_bytes) + " bytes");
    if (m.rows < 1 || m.cols < 1)
        throw Error("ShapeError", "empty matrix", where, "rows and columns",
                    std::to_string(m.rows) + " x " + std::to_string(m.cols));
    if (m.rows > kLargestSide || m.cols > kLargestSide)
        throw Error("ShapeError", "matrix larger than any file", where, "sides up to " + std::to_string(kLargestSide),
                    std::to_string(m.rows) + " x " + std::to_string(m.cols));
}

// Eight nibbles e0 … e7 of four bytes in the order of a vector's row: byte k is e(k) low, e(4 + k) high. Two words at once.
uint64_t interleave_nibbles(uint64_t x) {
    x = (x & 0xFF0000FFFF0000FFu) | ((x & 0x00FF000000FF0000u) >> 8) | ((x & 0x0000FF000000FF00u) << 8);
    return (x & 0xF00FF00FF00FF00Fu) | ((x & 0x0F000F000F000F00u) >> 4) | ((x & 0x00F000F000F000F0u) << 4);
}

// Adds one row's part of one group to its vectors: the source goes on in words, the vectors lie 64 bytes apart.
void scatter_int4(const uint8_t* src, int64_t group, uint8_t* out) {
    for (int64_t t = 0; t < group / 8; t += 2, src += 8, out += 2 * kVector) {
        uint64_t pair;
        std::memcpy(&pair, src, 8);
        pair = interleave_nibbles(pair);
        const auto low = static_cast<uint32_t>(pair), high = static_cast<uint32_t>(pair >> 32);
        std::memcpy(out, &low, 4);
        std::memcpy(out + kVector, &high, 4);
    }
}

void scatter_int8(const uint8_t* src, uint8_t* out) {
    for (int64_t t = 0; t < kActivationGroup / 4; ++t, src += 4, out += kVector) {
        uint32_t word;
        std::memcpy(&word, src, 4);
        word ^= 0x80808080u;
        std::memcpy(out, &word, 4);
    }
}

// A row's part of a group that the matrix does not fill, filled up with zero weights.
void scatter_partial(const StoredMatrix& m, const uint8_t* src, int64_t present, uint8_t* out) {
    std::array<uint8_t, 128> filled;
    if (m.bits == 8) {
        filled.fill(0);
        std::copy_n(src, present, filled.begin());
        return scatter_int8(filled.data(), out);
    }
    filled.fill(0x88);
    std::copy_n(src, ceil_div(present, 2), filled.begin());
    // An odd row ends in the middle of a byte, whose other nibble means nothing.
    uint8_t& last = filled[static_cast<size_t>(present / 2)];
    if (present % 2) last = static_cast<uint8_t>((last & 0x0F) | 0x80);
    scatter_int4(filled.data(), group_of(m), out);
}

// Scales of one column of `scales` [rows][stride] for the rows of a block.
void copy_scales(const uint8_t* scales, int64_t stride, int64_t first_row, int64_t rows, uint8_t* out) {
    for (int64_t r = 0; r < kRowBlock; ++r) {
        if (first_row + r < rows)
            std::memcpy(out + 4 * r, scales + 4 * (first_row + r) * stride, 4);
        else
            std::memset(out + 4 * r, 0, 4);
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
    const int64_t blocks = ceil_div(m.rows, kRowBlock), groups = ceil_div(m.cols, group_of(m));
    return blocks * (m.bits == 8 ? int8_block_bytes(groups) : groups * int4_record_bytes(group_of(m), m.scale_bytes));
}

void repack_rows16(const StoredMatrix& m, const uint8_t* weights, const uint8_t* scales, uint8_t* out) {
    const int64_t group = group_of(m), groups = ceil_div(m.cols, group);
    const int64_t row_bytes = m.bits == 8 ? m.cols : ceil_div(m.cols, 2), group_bytes = m.bits == 8 ? group : group / 2;
    for (int64_t first = 0; first < m.rows; first += kRowBlock) {
        if (m.bits == 8) {
            copy_scales(scales, 1, first, m.rows, out);
            out += 4 * kRowBlock;
        }
        // A group of all rows is done before the next group: what is written stays in the nearest cache.
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t in_group = std::min(group, m.cols - g * group);
            for (int64_t r = 0; r < kRowBlock; ++r) {
                const int64_t present = first + r < m.rows ? in_group : 0;
                const uint8_t* src = present ? weights + (first + r) * row_bytes + g * group_bytes : weights;
                if (present < group)
                    scatter_partial(m, src, present, out + 4 * r);
                else if (m.bits == 8)
                    scatter_int8(src, out + 4 * r);
                else
                    scatter_int4(src, group, out + 4 * r);
            }
            out += kRowBlock * group_bytes;
            if (m.bits == 4) {
                copy_scales(m.group_size ? scales + 4 * g : scales, m.group_size ? groups : 1, first, m.rows, out);
                out += 4 * kRowBlock;
            }
        }
    }
}

}  // namespace colibri
