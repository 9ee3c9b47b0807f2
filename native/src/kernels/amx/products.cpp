// AMX kernels: products of rows16 weights with many positions. Each equals kernels/scalar/quantized.cpp bit for bit: a tile
// product is one group's dot products, exact in int32, of 16 positions with 16 rows; the groups are added to float32 sums one
// by one, lanes being rows.
//
// Sixteen rows of four weights are what a rows16 vector holds and what a row of the second operand is. Weights are unpacked
// once for many positions, and made signed there, so that no offset has to be taken off each of the sums.
//
// What bounds it, from rates measured on one core of an Emerald Rapids machine (175 Gop/s of float32 FMA, that is 5.5 vector
// operations a nanosecond; 684 Gop/s of vpdpbusd, 5840 of AMX int8; 16 GB/s of DRAM). Sixteen positions times a row block and
// a group of 64 are 64 vector operations for the float32 sums (convert, two multiplications, add): 12 ns in both kernels. The
// products take 48 ns more with VNNI, and with AMX 6 ns beside the sums; reading the weights, 576 bytes, takes 36 ns. So
// at most 60 / 12 = 5 times VNNI with many positions, and with weights from DRAM at most 60 / 36 = 1.7 times at sixteen: two
// times needs twenty.
#define COLIBRI_ISA avx512
#include "products.h"

#include "../avx512/lanes.h"
#include "../avx512/scales.h"
#include "../parts.h"
#include "tiles.h"

namespace colibri::COLIBRI_AMX {

namespace {

// Below these the vector kernels take over. Few positions do not pay for unpacking; in short groups nearly all of the work is
// the float32 sums, which are the same there.
constexpr int64_t kFewestPositions = 8;
constexpr int64_t kShortestGroup = 32;
// A longer group is several tile products. One that does not divide so is the vector kernels' too.
constexpr int64_t kMostParts = 4;

constexpr int64_t kPositions = kTileRows;  // of an activation tile
// Two row blocks take turns with one activation tile, which so comes from the second-level cache once for both.
constexpr int64_t kBlocks = 2;
// Unpacked weights of one row block, a run of whole groups: two of them and an activation tile of the same length fill the
// first-level cache. Between runs the float32 sums wait in y.
constexpr int64_t kRunBytes = 16 * 1024;
constexpr int64_t kRunGroups = kRunBytes / (kRowBlock * kShortestGroup);
// Activations that a pass over the weights goes through: they stay in the second-level cache.
constexpr int64_t kPassBytes = 768 * 1024;
// Tile products run two groups ahead of the sums.
constexpr int kAhead = 2;

static_assert(kMostParts * kTileRowBytes * kRowBlock <= kRunBytes);

using Sums = int32_t[kPositions][kRowBlock];

struct Scratch {
    alignas(64) int8_t weights[kBlocks][kRunBytes];
    alignas(64) float scale_w[kBlocks][kRunGroups][kRowBlock];
    // Copied to constant distances, so that they need no registers for their addresses; 0 past the last position.
    alignas(64) float scale_x[kPositions][kRunGroups];
    alignas(64) Sums sums[2 * kAhead];
};

// How a group becomes tile products.
struct Shape {
    int64_t group;
    int64_t part;  // inputs of one of them; 0 if they cannot be
};

// One row block times one tile of positions, over a run of groups.
struct Strip {
    Shape shape;
    int64_t groups;
    const int8_t* q;  // of the first position
    int64_t q_stride;
    const int8_t* weights;
    const float (*scale_w)[kRowBlock];
    float* y;
    int64_t y_stride;
    int64_t positions;
    __mmask16 rows;
    bool from_zero;        // or from y
    const uint8_t* fetch;  // weights to fetch meanwhile; nullptr: none
    int64_t fetch_record;  // bytes of them for each group
};

// Tiles: sums, activations and weights of even and of odd groups, then those of a last, lower tile of positions.
struct Even {
    static constexpr int sum = 0, x = 1;
};
struct Odd {
    static constexpr int sum = 2, x = 3;
};
struct Last {
    static constexpr int sum = 4, x = 5;
};
constexpr int kEvenWeights = 6, kOddWeights = 7;

Shape shape_of(int64_t group) {
    if (group < kShortestGroup) return {group, 0};
    for (int64_t parts = (group + kTileRowBytes - 1) / kTileRowBytes; parts <= kMostParts; ++parts) {
        if (group % (4 * parts) == 0) return {group, group / parts};
    }
    return {group, 0};
}

void configure(const Shape& shape, int64_t n) {
    TileConfig config{};
    config.palette = 1;
    const auto set = [&](int tile, int64_t rows, int64_t row_bytes) {
        config.rows[tile] = static_cast<uint8_t>(rows);
        config.row_bytes[tile] = static_cast<uint16_t>(rows > 0 ? row_bytes : 0);
    };
    for (const int tile : {Even::sum, Odd::sum}) set(tile, n < kPositions ? n : kPositions, 4 * kRowBlock);
    for (const int tile : {Even::x, Odd::x}) set(tile, n < kPositions ? n : kPositions, shape.part);
    set(Last::sum, n > kPositions ? n % kPositions : 0, 4 * kRowBlock);
    set(Last::x, n > kPositions ? n % kPositions : 0, shape.part);
    for (const int tile : {kEvenWeights, kOddWeights}) set(tile, shape.part / 4, 4 * kRowBlock);
    tile_configure(config);
}

inline void prefetch(const uint8_t* address) { _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T1); }

// Every second line of a record. Unpacking fetches the even ones of the next run, the first tile of positions the odd ones:
// so memory is busy all the time.
inline void fetch_half(const uint8_t* record, int64_t bytes, int64_t first) {
    for (int64_t at = first; at < bytes; at += 128) prefetch(record + at);
}

template <typename Tiles, int kWeights>
inline void multiply(const Strip& s, int64_t g, Sums& sums) {
    const int8_t* q = s.q + g * s.shape.group;
    const int8_t* weights = s.weights + g * s.shape.group * kRowBlock;
    tile_zero<Tiles::sum>();
    for (int64_t i = 0; i < s.shape.group; i += s.shape.part) {
        tile_load<Tiles::x>(q + i, s.q_stride);
        tile_load<kWeights>(weights + i * kRowBlock, 4 * kRowBlock);
        tile_dot<Tiles::sum, Tiles::x, kWeights>();
    }
    tile_store<Tiles::sum>(&sums[0][0], 4 * kRowBlock);
}

// P is the number of positions rounded up: what lies past the last one is computed and not stored.
template <int P, typename First, typename Second>
void run_strip(const Strip& strip, Scratch& scratch) {
    const Strip s = strip;  // nothing else can change it
    __m512 acc[P];
#pragma GCC unroll 16
    for (int i = 0; i < P; ++i) {
        const __mmask16 present = s.from_zero || i >= s.positions ? static_cast<__mmask16>(0) : s.rows;
        acc[i] = _mm512_maskz_loadu_ps(present, s.y + i * s.y_stride);
    }
    const auto products = [&](int64_t g) {
        if (g >= s.groups) return;
        Sums& sums = scratch.sums[g % (2 * kAhead)];
        if (g % 2 == 0) {
            multiply<First, kEvenWeights>(s, g, sums);
        } else {
            multiply<Second, kOddWeights>(s, g, sums);
        }
    };
    for (int g = 0; g < kAhead; ++g) products(g);
    for (int64_t g = 0; g < s.groups; ++g) {
        products(g + kAhead);
        if (s.fetch) fetch_half(s.fetch + g * s.fetch_record, s.fetch_record, 64);
        const Sums& sums = scratch.sums[g % (2 * kAhead)];
        const __m512 scale_w = _mm512_load_ps(s.scale_w[g]);
#pragma GCC unroll 16
        for (int i = 0; i < P; ++i) {
            const __m512 scale = _mm512_mul_ps(scale_w, _mm512_set1_ps(scratch.scale_x[i][g]));
            acc[i] = _mm512_add_ps(acc[i], _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums[i])), scale));
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < P; ++i) {
        if (i < s.positions) _mm512_mask_storeu_ps(s.y + i * s.y_stride, s.rows, acc[i]);
    }
}

template <typename First, typename Second>
void run_strip(const Strip& s, Scratch& scratch) {
    switch ((s.positions + 3) / 4) {
        case 1:
            return run_strip<4, First, Second>(s, scratch);
        case 2:
            return run_strip<8, First, Second>(s, scratch);
        case 3:
            return run_strip<12, First, Second>(s, scratch);
        default:
            return run_strip<16, First, Second>(s, scratch);
    }
}

// A record of a group becomes the rows of its tiles, which are signed, and a scale for every row.
template <typename Scales>
struct Int4 {
    static constexpr int64_t header = 0;
    static int64_t record(int64_t group) { return int4_record_bytes(group, Scales::bytes); }

    static void unpack(const uint8_t*, const uint8_t* record, int64_t group, int8_t* weights, float* scales) {
        const __m512i nibble = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(8);
        for (int64_t t = 0; t < group / 8; ++t) {
            const __m512i pair = _mm512_loadu_si512(record + 64 * t);
            const __m512i low = _mm512_and_si512(pair, nibble), high = _mm512_and_si512(_mm512_srli_epi16(pair, 4), nibble);
            _mm512_store_si512(weights + 128 * t, _mm512_sub_epi8(low, offset));
            _mm512_store_si512(weights + 128 * t + 64, _mm512_sub_epi8(high, offset));
        }
        _mm512_store_ps(scales, Scales::all(record + 8 * group));
    }
};

struct Int8 {
    static constexpr int64_t header = 4 * kRowBlock;
    static int64_t record(int64_t group) { return kRowBlock * group; }

    static void unpack(const uint8_t* block, const uint8_t* record, int64_t group, int8_t* weights, float* scales) {
        const __m512i offset = _mm512_set1_epi8(static_cast<char>(-128));
        for (int64_t t = 0; t < group / 4; ++t) {
            _mm512_store_si512(weights + 64 * t, _mm512_xor_si512(_mm512_loadu_si512(record + 64 * t), offset));
        }
        _mm512_store_ps(scales, avx512::F32Scales::all(block));  // of the whole row
    }
};

void copy_scales(const float* from, int64_t stride, int64_t positions, int64_t groups, Scratch& scratch) {
    for (int64_t p = 0; p < kPositions; ++p) {
        for (int64_t g = 0; g < groups; g += 16) {
            const __mmask16 present = p < positions ? avx512::lanes_below(groups - g) : static_cast<__mmask16>(0);
            _mm512_store_ps(&scratch.scale_x[p][g], _mm512_maskz_loadu_ps(present, from + p * stride + g));
        }
    }
}

// Positions [p_begin, p_end), p_begin being a multiple of 16, times the row blocks.
template <typename Format>
void run_pass(const Shape& shape, const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end,
              const QuantizedActivations& x, int64_t p_begin, int64_t p_end, float* y, int64_t y_stride, Scratch& scratch) {
    const int64_t record = Format::record(shape.group), block_bytes = Format::header + x.groups * record;
    const int64_t run = kRunBytes / (kRowBlock * shape.group);
    Strip s{};
    s.shape = shape;
    s.q_stride = x.groups * shape.group;
    s.y_stride = y_stride;
    s.fetch_record = record;
    for (int64_t b = block_begin; b < block_end; b += kBlocks) {
        const int64_t blocks = block_end - b < kBlocks ? block_end - b : kBlocks;
        for (int64_t g = 0; g < x.groups; g += run) {
            s.groups = x.groups - g < run ? x.groups - g : run;
            s.from_zero = g == 0;
            const uint8_t* fetch[kBlocks] = {};
            for (int64_t k = 0; k < blocks; ++k) {
                const uint8_t* block = w + (b + k) * block_bytes;
                const uint8_t* records = block + Format::header + g * record;
                if (g + run < x.groups) {
                    fetch[k] = records + run * record;
                } else if (b + k + kBlocks < block_end) {
                    fetch[k] = block + kBlocks * block_bytes;
                }
                for (int64_t i = 0; i < s.groups; ++i) {
                    if (fetch[k]) fetch_half(fetch[k] + i * record, record, 0);
                    Format::unpack(block, records + i * record, shape.group, scratch.weights[k] + i * kRowBlock * shape.group,
                                   scratch.scale_w[k][i]);
                }
            }
            for (int64_t p = p_begin; p < p_end; p += kPositions) {
                s.positions = p_end - p < kPositions ? p_end - p : kPositions;
                s.q = x.q + (p * x.groups + g) * shape.group;
                copy_scales(x.scales + p * x.groups + g, x.groups, s.positions, s.groups, scratch);
                for (int64_t k = 0; k < blocks; ++k) {
                    const int64_t row = (b + k) * kRowBlock;
                    s.weights = scratch.weights[k];
                    s.scale_w = scratch.scale_w[k];
                    s.y = y + p * y_stride + row;
                    s.rows = avx512::lanes_below(rows - row);
                    s.fetch = p == p_begin ? fetch[k] : nullptr;
                    if (p > 0 && s.positions < kPositions) {
                        run_strip<Last, Last>(s, scratch);
                    } else {
                        run_strip<Even, Odd>(s, scratch);
                    }
                }
            }
        }
    }
}

template <typename Format>
void matmul(const Shape& shape, const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end,
            const QuantizedActivations& x, float* y, int64_t y_stride) {
    Scratch scratch;
    for (Sums& sums : scratch.sums) {  // a lower tile leaves rows of them unwritten
        for (auto& row : sums) _mm512_store_si512(row, _mm512_setzero_si512());
    }
    const int64_t fitting = kPassBytes / (x.groups * shape.group) / kPositions * kPositions;
    const int64_t pass = fitting < kPositions ? kPositions : fitting;
    configure(shape, x.n);
    for (int64_t p = 0; p < x.n; p += pass) {
        run_pass<Format>(shape, w, rows, block_begin, block_end, x, p, p + pass < x.n ? p + pass : x.n, y, y_stride, scratch);
    }
    tile_release();
}

// By tiles, or where they do not pay by the vector kernel.
template <typename Format>
void product(decltype(Kernels::matmul_int4) vectors, const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end,
             const QuantizedActivations& x, float* y, int64_t y_stride) {
    const Shape shape = shape_of(x.group);
    if (x.n < kFewestPositions || x.groups == 0 || shape.part == 0) {
        vectors(w, rows, block_begin, block_end, x, y, y_stride);
    } else {
        matmul<Format>(shape, w, rows, block_begin, block_end, x, y, y_stride);
    }
}

}  // namespace

void matmul_int4(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                 int64_t y_stride) {
    product<Int4<avx512::F32Scales>>(avx512::matmul_int4, w, rows, block_begin, block_end, x, y, y_stride);
}

void matmul_int4_f16(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x,
                     float* y, int64_t y_stride) {
    product<Int4<avx512::F16Scales>>(avx512::matmul_int4_f16, w, rows, block_begin, block_end, x, y, y_stride);
}

void matmul_int8(const uint8_t* w, int64_t rows, int64_t block_begin, int64_t block_end, const QuantizedActivations& x, float* y,
                 int64_t y_stride) {
    product<Int8>(avx512::matmul_int8, w, rows, block_begin, block_end, x, y, y_stride);
}

}  // namespace colibri::COLIBRI_AMX
