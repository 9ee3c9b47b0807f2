// AMX kernels: the few tile operations that products.cpp needs, as instructions or emulated.
//
// A tile is up to 16 rows of up to 64 bytes; a thread has eight. The emulation (COLIBRI_AMX_EMULATED) does what the processor's
// manual says, in plain C++, so that everything around the operations is tested where no processor has them. What a processor
// would fault on ends the process there too. COLIBRI_AMX_SWAPPED is a planted fault for the self-test.
//
// The instructions are written as assembly with a memory clobber: the intrinsics of g++ 12 let the compiler keep back stores
// that a configuration or a tile is loaded from.
#pragma once

#include <cstdint>

namespace colibri::COLIBRI_AMX {

constexpr int kTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

// The operand of LDTILECFG, palette 1. A tile of 0 rows and 0 bytes is not used.
struct alignas(64) TileConfig {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

#ifndef COLIBRI_AMX_EMULATED

static inline void tile_configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory"); }

static inline void tile_release() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int kTile>
static inline void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// The rows of a tile, `stride` bytes apart.
template <int kTile>
static inline void tile_load(const int8_t* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
static inline void tile_store(int32_t* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}

// TDPBSSD: sum[m][n] += a[m][4k + i] * b[k][4n + i] over k and i < 4; bytes are signed, sums are int32.
template <int kSum, int kA, int kB>
static inline void tile_dot() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

#else

#ifdef COLIBRI_AMX_SWAPPED
constexpr bool kSwapped = true;
#else
constexpr bool kSwapped = false;
#endif

struct TileFile {
    TileConfig config;
    int8_t bytes[kTiles][kTileRows][kTileRowBytes];
};
static thread_local TileFile tile_file;

static inline void must(bool holds) {
    if (!holds) __builtin_trap();
}

static inline int rows_of(int tile) { return tile_file.config.rows[tile]; }
static inline int row_bytes_of(int tile) { return tile_file.config.row_bytes[tile]; }

static inline void must_be_configured(int tile) { must(tile < kTiles && tile_file.config.palette == 1 && rows_of(tile) > 0); }

static void tile_configure(const TileConfig& config) {
    must(config.palette == 1 && config.start_row == 0);
    for (const uint8_t byte : config.reserved) must(byte == 0);
    for (int tile = 0; tile < 16; ++tile) {
        must(config.rows[tile] <= (tile < kTiles ? kTileRows : 0) && config.row_bytes[tile] <= (tile < kTiles ? kTileRowBytes : 0));
        must((config.rows[tile] == 0) == (config.row_bytes[tile] == 0));
    }
    tile_file = {};
    tile_file.config = config;
}

static void tile_release() { tile_file = {}; }

static void emulate_zero(int tile) {
    must_be_configured(tile);
    __builtin_memset(tile_file.bytes[tile], 0, sizeof tile_file.bytes[tile]);
}

static void emulate_load(int tile, const int8_t* from, int64_t stride) {
    emulate_zero(tile);  // what lies outside of the tile's shape too
    for (int row = 0; row < rows_of(tile); ++row) {
        for (int byte = 0; byte < row_bytes_of(tile); ++byte) tile_file.bytes[tile][row][byte] = from[row * stride + byte];
    }
}

static void emulate_store(int tile, int32_t* to, int64_t stride) {
    must_be_configured(tile);
    for (int row = 0; row < rows_of(tile); ++row) {
        int8_t* bytes = reinterpret_cast<int8_t*>(to) + row * stride;
        for (int byte = 0; byte < row_bytes_of(tile); ++byte) bytes[byte] = tile_file.bytes[tile][row][byte];
    }
}

static void emulate_dot(int sum, int a, int b) {
    for (const int tile : {sum, a, b}) must_be_configured(tile);
    must(sum != a && sum != b && a != b && row_bytes_of(sum) % 4 == 0 && row_bytes_of(a) % 4 == 0);
    must(rows_of(sum) == rows_of(a) && row_bytes_of(sum) == row_bytes_of(b) && rows_of(b) == row_bytes_of(a) / 4);
    const auto& from_a = tile_file.bytes[kSwapped ? b : a];
    const auto& from_b = tile_file.bytes[kSwapped ? a : b];
    for (int m = 0; m < rows_of(sum); ++m) {
        for (int n = 0; n < row_bytes_of(sum) / 4; ++n) {
            uint32_t value;  // wraps around like the processor's
            __builtin_memcpy(&value, &tile_file.bytes[sum][m][4 * n], sizeof value);
            for (int k = 0; k < row_bytes_of(a) / 4; ++k) {
                for (int i = 0; i < 4; ++i) value += static_cast<uint32_t>(from_a[m][4 * k + i] * from_b[k][4 * n + i]);
            }
            __builtin_memcpy(&tile_file.bytes[sum][m][4 * n], &value, sizeof value);
        }
    }
}

template <int kTile>
static inline void tile_zero() {
    emulate_zero(kTile);
}

template <int kTile>
static inline void tile_load(const int8_t* from, int64_t stride) {
    emulate_load(kTile, from, stride);
}

template <int kTile>
static inline void tile_store(int32_t* to, int64_t stride) {
    emulate_store(kTile, to, stride);
}

template <int kSum, int kA, int kB>
static inline void tile_dot() {
    emulate_dot(kSum, kA, kB);
}

#endif

}  // namespace colibri::COLIBRI_AMX
