// Self-test of the kernels, without Python: for cross-compiled builds and sanitizers.
//
// Every table runs the same cases on shapes off every vector width; its outputs must equal the scalar table's bit for bit.
// The scalar outputs have a fixed digest, so that processors of different kinds are compared too. Inputs end exactly where
// their allocation ends and start off the vector alignment; outputs are followed by sentinels. Exit status 0: all equal.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../src/kernels/amx_permission.h"
#include "colibri/kernels.h"

#if defined(COLIBRI_X86) && defined(COLIBRI_AMX_EMULATION)
namespace colibri::amx_swapped {
extern const Kernels table;  // its tile products take each other's operands
}
#endif

namespace {

using colibri::Kernels;
using colibri::kRowBlock;

// The digest of every scalar output below. It changes when a case or a kernel's definition changes, never with the machine.
constexpr uint64_t kScalarDigest = 0xd0fe48567ffd52c7;

constexpr float kSentinel = -7777.25f;

class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {  // SplitMix64
        uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    float uniform(float scale) { return static_cast<float>(static_cast<int64_t>(next() >> 40) - (1 << 23)) * (scale / (1 << 23)); }

  private:
    uint64_t state_;
};

// `size` elements that end where the allocation ends and start `offset` elements after its beginning.
template <typename T, int64_t offset>
class Exact {
  public:
    explicit Exact(int64_t size, T fill = T{}) : storage_(static_cast<size_t>(size + offset), fill) {}
    T* data() { return storage_.data() + offset; }
    T& operator[](int64_t i) { return storage_[static_cast<size_t>(i + offset)]; }
    int64_t size() const { return static_cast<int64_t>(storage_.size()) - offset; }

  private:
    std::vector<T> storage_;
};
using Floats = Exact<float, 1>;
using Bytes = Exact<uint8_t, 1>;

Floats random_floats(Random& random, int64_t size, float scale) {
    Floats values(size);
    for (int64_t i = 0; i < size; ++i) values[i] = i % 11 == 5 ? -0.0f : random.uniform(scale);
    return values;
}

struct Output {
    std::string name;
    std::vector<uint8_t> bytes;
};

class Recorder {
  public:
    template <typename T>
    void add(const std::string& name, const T* data, int64_t count) {
        Output output{name, std::vector<uint8_t>(static_cast<size_t>(count) * sizeof(T))};
        if (count > 0) std::memcpy(output.bytes.data(), data, output.bytes.size());
        outputs.push_back(output);
    }
    std::vector<Output> outputs;
};

std::string label(const char* name, std::initializer_list<int64_t> shape) {
    std::string text = name;
    for (const int64_t size : shape) {
        text += ' ';
        text += std::to_string(size);
    }
    return text;
}

enum class Weight { int8, int4, int4_f16 };

// A scale in its stored form: float32 near the usual ones, or any finite float16.
void random_scale(Random& random, Weight weight, uint8_t* to) {
    if (weight == Weight::int4_f16) {
        auto half = static_cast<uint16_t>(random.next() >> 48);
        if ((half & 0x7c00) == 0x7c00) half &= 0xbfff;
        std::memcpy(to, &half, sizeof half);
    } else {
        const float scale = random.uniform(0.02f);
        std::memcpy(to, &scale, sizeof scale);
    }
}

void run_products(const Kernels& kernels, Random& random, Weight weight, int64_t rows, int64_t cols, int64_t group, int64_t n,
                  Recorder& recorder) {
    const int64_t groups = (cols + group - 1) / group, blocks = (rows + kRowBlock - 1) / kRowBlock;
    const bool int4 = weight != Weight::int8;
    const int64_t scale_bytes = weight == Weight::int4_f16 ? 2 : 4, record = colibri::int4_record_bytes(group, scale_bytes);
    const int64_t block_bytes = int4 ? groups * record : colibri::int8_block_bytes(groups);
    Bytes w(blocks * block_bytes);
    for (int64_t i = 0; i < w.size(); ++i) w[i] = static_cast<uint8_t>(random.next() >> 56);
    for (int64_t b = 0; b < blocks; ++b) {
        for (int64_t g = 0; g < (int4 ? groups : 1); ++g) {
            uint8_t* scales = w.data() + b * block_bytes + (int4 ? g * record + 8 * group : 0);
            for (int64_t r = 0; r < kRowBlock; ++r) random_scale(random, weight, scales + scale_bytes * r);
        }
    }
    Exact<int8_t, 1> q(n * groups * group, 99);
    Floats scales(n * groups, kSentinel);
    Exact<int32_t, 1> sums(n * groups, 99);
    for (int64_t p = 0; p < n; ++p) {
        Floats x = random_floats(random, cols, p % 4 == 3 ? 1e-33f : 3.0f);
        kernels.quantize(x.data(), cols, group, q.data() + p * groups * group, scales.data() + p * groups,
                         sums.data() + p * groups);
    }
    const std::string shape = label(!int4 ? "int8" : scale_bytes == 2 ? "int4 f16" : "int4", {rows, cols, group, n});
    recorder.add("quantize q, " + shape, q.data(), q.size());
    recorder.add("quantize scales, " + shape, scales.data(), scales.size());
    recorder.add("quantize sums, " + shape, sums.data(), sums.size());

    const auto matmul = !int4 ? kernels.matmul_int8 : scale_bytes == 2 ? kernels.matmul_int4_f16 : kernels.matmul_int4;
    const int64_t stride = rows + 3, middle = blocks / 2;
    const colibri::QuantizedActivations x{
        .q = q.data(), .scales = scales.data(), .sums = sums.data(), .n = n, .groups = groups, .group = group};
    Floats y(n * stride, kSentinel);
    matmul(w.data(), rows, 0, middle, x, y.data(), stride);
    matmul(w.data(), rows, middle, blocks, x, y.data(), stride);
    recorder.add("matmul " + shape, y.data(), y.size());

    const int64_t last = n - 1;
    const colibri::QuantizedActivations alone{.q = q.data() + last * groups * group,
                                              .scales = scales.data() + last * groups,
                                              .sums = sums.data() + last * groups,
                                              .n = 1,
                                              .groups = groups,
                                              .group = group};
    Floats one(rows, kSentinel);
    matmul(w.data(), rows, 0, blocks, alone, one.data(), rows);
    if (std::memcmp(one.data(), y.data() + last * stride, static_cast<size_t>(rows) * sizeof(float)) != 0) {
        recorder.add("NOT BATCH INVARIANT " + shape + kernels.name, one.data(), rows);
    }

    Floats out(kRowBlock * (cols + 1), kSentinel);
    if (int4) {
        (scale_bytes == 2 ? kernels.dequantize_int4_f16_block : kernels.dequantize_int4_block)(w.data(), cols, group, out.data(),
                                                                                               cols + 1);
        Floats row(cols + 1, kSentinel);
        kernels.dequantize_int4_row(w.data(), scales.data(), cols, group, row.data());
        recorder.add("dequantize row " + shape, row.data(), row.size());
    } else {
        kernels.dequantize_int8_block(w.data(), cols, out.data(), cols + 1);
        Floats row(cols + 1, kSentinel);
        kernels.dequantize_int8_row(q.data(), 0.0371f, cols, row.data());
        recorder.add("dequantize row " + shape, row.data(), row.size());
    }
    recorder.add("dequantize block " + shape, out.data(), out.size());
}

void run_floats(const Kernels& kernels, Random& random, int64_t n, Recorder& recorder) {
    Floats a = random_floats(random, n, 2.0f), b = random_floats(random, n, 0.5f), c = random_floats(random, n, 100.0f);
    const float dot = kernels.dot(a.data(), b.data(), n);
    const double dot_f64 = kernels.dot_f64(a.data(), b.data(), n);
    recorder.add(label("dot", {n}), &dot, 1);
    recorder.add(label("dot_f64", {n}), &dot_f64, 1);
    Floats y(n + 1, kSentinel);
    if (n > 0) {
        kernels.rms_norm(a.data(), b.data(), 1e-5f, n, y.data());
        recorder.add(label("rms_norm", {n}), y.data(), n + 1);
        kernels.layer_norm(a.data(), b.data(), c.data(), 1e-5f, n, y.data());
        recorder.add(label("layer_norm", {n}), y.data(), n + 1);
    }
    kernels.axpy(-1.375f, a.data(), n, y.data());
    recorder.add(label("axpy", {n}), y.data(), n + 1);
    kernels.silu_mul(c.data(), a.data(), n, y.data());
    recorder.add(label("silu_mul", {n}), y.data(), n + 1);
    std::memcpy(y.data(), c.data(), static_cast<size_t>(n) * sizeof(float));
    kernels.softmax(y.data(), n);
    recorder.add(label("softmax", {n}), y.data(), n + 1);
    for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{16}, int64_t{37}}) {
        const int64_t stride = n + 5;
        Floats w = random_floats(random, rows > 0 ? (rows - 1) * stride + n : 0, 1.0f);
        Floats x = random_floats(random, rows, 1.0f);
        Floats columns(n + 1, kSentinel);
        kernels.dot_columns(w.data(), stride, rows, n, x.data(), columns.data());
        recorder.add(label("dot_columns", {rows, n}), columns.data(), n + 1);
    }
}

std::vector<Output> outputs_of(const Kernels& kernels) {
    Random random(20240607);
    Recorder recorder;
    const int64_t shapes[][2] = {{1, 1}, {3, 7}, {15, 17}, {16, 64}, {17, 65}, {31, 129}, {33, 200}, {50, 299}};
    for (const auto& shape : shapes) {
        for (const int64_t n : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{9}}) {
            for (const int64_t group :
                 {int64_t{8}, int64_t{16}, int64_t{24}, int64_t{48}, int64_t{64}, int64_t{96}, int64_t{256}}) {
                run_products(kernels, random, Weight::int4, shape[0], shape[1], group, n, recorder);
            }
            run_products(kernels, random, Weight::int8, shape[0], shape[1], colibri::kActivationGroup, n, recorder);
        }
    }
    // Many positions: whole and lower tiles of 16, several runs of 16 KiB of weights, several passes of 768 KiB of activations.
    const int64_t many[][4] = {{17, 65, 64, 8},    {33, 1100, 64, 16},  {31, 2100, 64, 21}, {50, 3000, 128, 45},
                               {16, 1100, 32, 28}, {40, 1300, 48, 19},  {33, 700, 96, 32},  {17, 1000, 192, 33},
                               {20, 1500, 256, 9}, {18, 1200, 136, 20}, {18, 300, 40, 34},  {20, 20000, 64, 37}};
    for (const auto& shape : many) {
        run_products(kernels, random, Weight::int4, shape[0], shape[1], shape[2], shape[3], recorder);
        if (shape[2] == 64) run_products(kernels, random, Weight::int8, shape[0], shape[1], shape[2], shape[3], recorder);
    }
    for (int64_t n = 0; n <= 70; ++n) run_floats(kernels, random, n, recorder);
    run_floats(kernels, random, 300, recorder);
    for (const auto& shape : shapes)
        for (const int64_t group : {int64_t{8}, int64_t{24}, int64_t{64}, int64_t{256}})
            run_products(kernels, random, Weight::int4_f16, shape[0], shape[1], group, shape[0] % 5 + 1, recorder);
    for (const auto& shape : many)
        run_products(kernels, random, Weight::int4_f16, shape[0], shape[1], shape[2], shape[3], recorder);
    return recorder.outputs;
}

// The name of the first output that differs; empty if none.
std::string first_difference(const std::vector<Output>& a, const std::vector<Output>& b) {
    for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
        if (a[i].name != b[i].name || a[i].bytes != b[i].bytes) return b[i].name;
    }
    return a.size() == b.size() ? "" : "number of outputs";
}

uint64_t digest(const std::vector<Output>& outputs) {
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
    for (const Output& output : outputs) {
        for (const uint8_t byte : output.bytes) hash = (hash ^ byte) * 0x100000001B3u;
    }
    return hash;
}

float dot_in_one_sum(const float* a, const float* b, int64_t n) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// AMX is taken only where the processor, the system and the process all have it.
bool amx_needs_all_three() {
    using colibri::amx_refusal;
    return amx_refusal({true, true, 0}).empty() && !amx_refusal({false, true, 0}).empty() &&
           !amx_refusal({true, false, 0}).empty() && !amx_refusal({true, true, 1}).empty() && !amx_refusal({}).empty();
}

}  // namespace

int main() {
    bool passed = true;
    const std::vector<Output> expected = outputs_of(colibri::kernels_for("scalar"));
    std::vector<std::string> isas = colibri::available_isas();
    const bool amx = isas.back() == "amx";
    if (amx != colibri::amx_refusal().empty() || !amx_needs_all_three()) {
        std::printf("AMX is taken without being granted, or not taken though it is\n");
        passed = false;
    }
    if (!amx) std::printf("amx: not here: %s\n", colibri::amx_refusal().c_str());
    for (const std::string& isa : colibri::emulated_isas()) isas.push_back(isa);
    for (const std::string& isa : isas) {
        const std::string difference = first_difference(expected, outputs_of(colibri::kernels_for(isa)));
        std::printf("%s: %s\n", isa.c_str(), difference.empty() ? "equal to scalar" : ("DIFFERS at " + difference).c_str());
        passed = passed && difference.empty();
    }
    for (const Output& output : expected) {
        if (output.name.starts_with("NOT")) {
            std::printf("scalar: %s\n", output.name.c_str());
            passed = false;
        }
    }
    Kernels wrong = colibri::kernels_for("scalar");
    wrong.dot = dot_in_one_sum;
    if (!first_difference(expected, outputs_of(wrong)).starts_with("dot ")) {
        std::printf("the planted wrong dot product was not found\n");
        passed = false;
    }
#if defined(COLIBRI_X86) && defined(COLIBRI_AMX_EMULATION)
    if (!colibri::emulated_isas().empty() &&
        !first_difference(expected, outputs_of(colibri::amx_swapped::table)).starts_with("matmul ")) {
        std::printf("the planted swap of a tile product's operands was not found\n");
        passed = false;
    }
#endif
    const uint64_t found = digest(expected);
    std::printf("scalar: %zu outputs, digest %016llx%s\n", expected.size(), static_cast<unsigned long long>(found),
                found == kScalarDigest ? "" : ", NOT the digest that every processor should give");
    return passed && found == kScalarDigest ? 0 : 1;
}
