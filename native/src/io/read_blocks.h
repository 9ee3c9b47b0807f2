// Blocks of one file read through a reader, without a store: what a benchmark compares the store with.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "reader.h"

namespace colibri {

struct BlockReads {
    double seconds = 0;               // from the first submission to the last completion
    uint64_t transferred = 0;         // bytes that the operating system delivered
    uint64_t retries = 0;             // calls that continued a short or interrupted one
    std::string reader;               // "direct, io_uring"
    std::vector<uint64_t> checksums;  // of each block, where asked for: sum of (2 i + 1) · word i, in 64 bits
};

// Reads `length` bytes at each offset, in order, with `depth` reads in flight and two more waiting, so that the disk has no gap.
// Offsets and length are multiples of kBlock. Memory is touched before the clock starts; with checksums the clock is of no use.
// Throws Error("OptionError"), Error("MissingFileError"), Error("ReadError").
BlockReads read_blocks(const std::string& path, std::span<const uint64_t> offsets, uint64_t length, bool direct, ReaderKind kind,
                       int depth, bool checksums);

}  // namespace colibri
