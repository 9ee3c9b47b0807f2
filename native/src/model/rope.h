// Rotary position embedding from tables in float64, rounded once; reference/attention.py.
#pragma once

#include <cstdint>

#include "buffer.h"
#include "colibri/engine.h"

namespace colibri {

// Angle i of position p is p * frequency_i. Interleaved: pairs (2i, 2i + 1) in, halves out. Else pairs (i, i + dim / 2), in place.
class Rope {
  public:
    Rope(const RopeSpec& spec, int64_t positions);
    // Rotates the first `dim` values at x for one position; `scratch` holds dim floats.
    void rotate(int64_t position, float* x, float* scratch) const;
    static int64_t memory_bytes(const RopeSpec& spec, int64_t positions) { return positions * spec.dim * 4; }

  private:
    int64_t half_;
    bool interleaved_;
    Buffer<float> cos_, sin_;  // [positions][dim / 2]
};

}  // namespace colibri
