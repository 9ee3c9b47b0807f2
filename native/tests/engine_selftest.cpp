// Self-test of the engine, without Python: for the sanitizers.
//
// engine_selftest [folder [fastest]]: writes a small random model of either attention, runs the same steps on engines that differ
// in cache, reader, threads and kernels (`fastest`: only the fastest ones), interrupts some steps and lets reads of others fail;
// all logits must be equal bit for bit. Exit status 0: they are.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "../src/io/faults.h"
#include "colibri/engine.h"
#include "colibri/error.h"
#include "colibri/kernels.h"
#include "colibri/repack.h"

namespace colibri {
namespace {

constexpr int64_t kWidth = 200, kVocab = 90, kContext = 64;
constexpr int kExperts = 8;

// One file that grows tensor by tensor.
class ModelFile {
  public:
    // `halves`: interleaved int4 has float16 scales.
    ModelFile(const std::string& path, bool halves) : out_(path, std::ios::binary), halves_(halves) {
        append(std::vector<uint8_t>(4096));
    }

    StoredMatrix floats(const std::string& name, int64_t rows, int64_t cols, float mean, float spread) {
        std::normal_distribution<float> normal(mean, spread);
        std::vector<float> values(static_cast<size_t>(rows * cols));
        for (float& value : values) value = normal(random_);
        StoredMatrix m{rows, cols, 32, 0, false, 4, {}, {}};
        m.weights = write(name, values.data(), values.size() * sizeof(float));
        return m;
    }

    // A product with it keeps about the variance of its input.
    StoredMatrix quantised(const std::string& name, int64_t rows, int64_t cols, int bits, bool rows16) {
        StoredMatrix m{rows, cols, bits, bits == 4 ? 64 : 0, false, 4, {}, {}};
        std::vector<uint8_t> weights(static_cast<size_t>(stored_weight_bytes(m)));
        for (uint8_t& byte : weights) byte = static_cast<uint8_t>(random_());
        const float scale = 1.0f / ((bits == 4 ? 4.6f : 74.0f) * std::sqrt(static_cast<float>(cols)));
        const std::vector<float> scales(static_cast<size_t>(stored_scale_bytes(m)) / sizeof(float), scale);
        if (!rows16) {
            m.weights = write(name, weights.data(), weights.size());
            m.scales = write(name + ".qs", scales.data(), scales.size() * sizeof(float));
            return m;
        }
        std::vector<uint8_t> packed(static_cast<size_t>(rows16_bytes(m)));
        repack_rows16(m, weights.data(), reinterpret_cast<const uint8_t*>(scales.data()), packed.data());
        m.rows16 = true;
        if (halves_ && bits == 4) {
            m.scale_bytes = 2;
            packed = with_halves(packed, m.group_size, scale);
        }
        m.weights = write(name, packed.data(), packed.size());
        return m;
    }

    void close() { out_.close(); }

  private:
    // Records of float32 scales become records of one float16 scale: the largest that is no larger.
    static std::vector<uint8_t> with_halves(const std::vector<uint8_t>& packed, int64_t group, float scale) {
        uint16_t half = 0;
        while (float_of_half(half + 1) <= scale) ++half;
        const std::vector<uint16_t> halves(kRowBlock, half);
        const auto weights = kRowBlock * group / 2, record = int4_record_bytes(group, 4);
        std::vector<uint8_t> out;
        for (auto at = packed.begin(); at != packed.end(); at += record) {
            out.insert(out.end(), at, at + weights);
            const auto* bytes = reinterpret_cast<const uint8_t*>(halves.data());
            out.insert(out.end(), bytes, bytes + 2 * kRowBlock);
        }
        return out;
    }
    void append(const std::vector<uint8_t>& data) {
        out_.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
        at_ += data.size();
    }
    Extent write(const std::string& name, const void* data, size_t nbytes) {
        const Extent extent{0, at_, nbytes, name};
        const auto* bytes = static_cast<const uint8_t*>(data);
        append({bytes, bytes + nbytes});
        return extent;
    }

    std::ofstream out_;
    bool halves_;
    std::mt19937 random_{7};
    uint64_t at_ = 0;
};

enum class Kind { mla, gqa };

struct Described {
    ModelSpec model;
    StoreOptions store;
};

MlaSpec mla_spec() { return {72, 40, 12, 20, 1e-6f}; }

// Every optional part, and half of a head rotated.
GqaSpec gqa_spec() { return {2, 18, true, QkNorm::head, 2.0f}; }

// Four layers, the first dense, and an MTP block. MLA: the indexer limits attention to 8 positions, layer 2 shares the choice of
// layer 1.
Described write_model(const std::string& path, Kind kind) {
    Described d;
    ModelSpec& m = d.model;
    m.vocab = kVocab;
    m.width = kWidth;
    m.layers = 4;
    m.dense_hidden = 140;
    m.sparse = {false, true, true, true};
    m.mtp = true;
    m.rms_eps = 1e-6f;
    m.attention.scale = 0.235f;
    if (kind == Kind::mla) {
        m.attention.kind = mla_spec();
        m.attention.heads = 3;
        m.attention.rope.dim = 6;
        m.indexer = {16, 24, 8, 1e-6f, {true, true, false, true}};
    } else {
        m.attention.kind = gqa_spec();
        m.attention.heads = 6;
        m.attention.rope.dim = 8;
        m.attention.rope.interleaved = false;
        m.attention.rope.yarn = {4.0, 16.0, 32.0, 1.0, true};
    }
    m.experts = kExperts;
    m.expert_hidden = 100;
    m.shared_hidden = 60;
    m.router.top_k = 3;
    m.router.n_group = 4;
    m.router.topk_group = 2;

    ModelFile file(path, kind == Kind::gqa);
    const auto floats = [&](const std::string& name, int64_t rows, int64_t cols, float mean, float spread) {
        m.tensors[name] = file.floats(name, rows, cols, mean, spread);
    };
    const auto quantised = [&](const std::string& name, int64_t rows, int64_t cols, int bits, bool rows16) {
        m.tensors[name] = file.quantised(name, rows, cols, bits, rows16);
    };
    quantised("embed", kVocab, kWidth, 8, false);
    for (int64_t layer = 0; layer <= m.layers; ++layer) {
        const bool sparse = layer == m.layers || m.sparse[layer];
        const int bits = layer == m.layers ? 8 : 4;
        const std::string p = "layers." + std::to_string(layer) + ".";
        floats(p + "attn_norm", 1, kWidth, 1, 0.1f);
        floats(p + "mlp_norm", 1, kWidth, 1, 0.1f);
        quantised(p + "attn.o", kWidth, m.attention.mixed_width(), 4, true);
        if (kind == Kind::mla) {
            const MlaSpec& mla = m.attention.mla();
            const int64_t heads = m.attention.heads, rope = m.attention.rope.dim;
            quantised(p + "attn.q_a", mla.q_rank, kWidth, 4, true);
            floats(p + "attn.q_a_norm", 1, mla.q_rank, 1, 0.1f);
            quantised(p + "attn.q_b", heads * (mla.nope + rope), mla.q_rank, 4, false);
            quantised(p + "attn.kv_a", mla.kv_rank + rope, kWidth, 8, false);
            floats(p + "attn.kv_a_norm", 1, mla.kv_rank, 1, 0.1f);
            quantised(p + "attn.kv_b", heads * (mla.nope + mla.value), mla.kv_rank, 4, false);
        } else {
            const GqaSpec& gqa = m.attention.gqa();
            for (const auto& [name, heads] : {std::pair{"q", m.attention.heads}, {"k", gqa.kv_heads}, {"v", gqa.kv_heads}}) {
                quantised(p + "attn." + name, heads * gqa.head_dim, kWidth, 4, name[0] == 'k');
                floats(p + "attn." + name + "_bias", 1, heads * gqa.head_dim, 0, 0.1f);
            }
            floats(p + "attn.q_norm", 1, gqa.head_dim, 1, 0.1f);
            floats(p + "attn.k_norm", 1, gqa.head_dim, 1, 0.1f);
        }
        if (m.indexer.chooses(layer)) {
            quantised(p + "indexer.wq_b", m.indexer.heads * m.indexer.dim, m.attention.mla().q_rank, 8, false);
            quantised(p + "indexer.wk", m.indexer.dim, kWidth, 8, false);
            floats(p + "indexer.k_norm_weight", 1, m.indexer.dim, 1, 0.1f);
            floats(p + "indexer.k_norm_bias", 1, m.indexer.dim, 0, 0.1f);
            floats(p + "indexer.weights_proj", m.indexer.heads, kWidth, 0, 0.07f);
        }
        const std::string mlp = p + (sparse ? "shared" : "mlp");
        const int64_t hidden = sparse ? m.shared_hidden : m.dense_hidden;
        quantised(mlp + ".gate", hidden, kWidth, bits, true);
        quantised(mlp + ".up", hidden, kWidth, bits, true);
        quantised(mlp + ".down", kWidth, hidden, bits, true);
        if (!sparse) continue;
        floats(p + "router.weight", kExperts, kWidth, 0, 0.14f);
        floats(p + "router.bias", 1, kExperts, 0, 0.1f);
        auto& experts = d.store.experts.emplace_back();
        for (int e = 0; e < kExperts; ++e) {
            const std::string q = p + "experts." + std::to_string(e);
            experts.push_back({file.quantised(q + ".gate", m.expert_hidden, kWidth, bits, true),
                               file.quantised(q + ".up", m.expert_hidden, kWidth, bits, true),
                               file.quantised(q + ".down", kWidth, m.expert_hidden, bits, true)});
        }
    }
    for (const char* norm : {"final_norm", "mtp.enorm", "mtp.hnorm", "mtp.norm"}) floats(norm, 1, kWidth, 1, 0.1f);
    quantised("mtp.eh_proj", kWidth, 2 * kWidth, 8, false);
    quantised("head", kVocab, kWidth, 8, false);
    file.close();
    d.store.files = {path};
    return d;
}

EngineOptions options_for(const Described& d, int64_t cache, int threads, bool direct, const std::string& isa) {
    EngineOptions o;
    o.store = d.store;
    o.store.cache_experts = cache;
    o.store.direct = direct;
    o.context = kContext;
    o.threads = threads;
    o.isa = isa;
    o.budgets = {4, 0, 2, 3};
    return o;
}

struct Step {
    std::vector<int32_t> tokens;
    int64_t rewind;
    bool budget;
};

std::vector<Step> steps() {
    std::mt19937 random(3);
    std::vector<Step> list;
    for (const auto& [n, rewind, budget] :
         {std::tuple{30, 0, false}, {1, 0, true}, {5, 0, true}, {4, 3, true}, {20, 25, false}, {1, 2, true}}) {
        Step step{{}, rewind, budget};
        for (int i = 0; i < n; ++i) step.tokens.push_back(static_cast<int32_t>(random() % kVocab));
        list.push_back(std::move(step));
    }
    return list;
}

bool never() { return false; }

// Logits of all steps; a step that `disturb` disturbs (an interrupt between layers, or a failing read) is done again.
std::vector<float> run(const Described& d, const EngineOptions& options, bool disturb, bool trace) {
    Engine engine(d.model, options);
    engine.set_trace(trace);
    std::vector<float> all;
    int abandoned = 0, failed = 0;
    for (const Step& step : steps()) {
        engine.rewind(step.rewind);
        const int64_t before = engine.position();
        std::vector<float> logits(step.tokens.size() * kVocab);
        if (disturb) {
            int asked = 0;
            const auto after_three = [&] { return ++asked == 3; };
            try {
                abandoned += !engine.forward(step.tokens, step.budget, false, logits.data(), after_three);
            } catch (const Error& error) {
                failed += error.kind == "ReadError";
            }
            if (engine.position() != before) return {};
        }
        // The same tokens go through the block, on the trunk's hidden states.
        for (const bool block : {false, true}) {
            const auto position = [&] { return block ? engine.mtp_position() : engine.position(); };
            if (position() != before) return {};
            for (bool finished = false; !finished;) {
                try {
                    finished = block ? engine.mtp_forward(step.tokens, engine.hidden().data(), step.budget, false, logits.data(),
                                                          never, true)
                                     : engine.forward(step.tokens, step.budget, false, logits.data(), never);
                } catch (const Error& error) {
                    if (error.kind != "ReadError" || position() != before) return {};
                    ++failed;
                }
            }
            if (position() != before + static_cast<int64_t>(step.tokens.size())) return {};
            all.insert(all.end(), logits.begin(), logits.end());
        }
    }
    if (disturb && (abandoned == 0 || failed == 0)) return {};
    return all;
}

int check(const std::string& folder, Kind kind, const std::vector<std::string>& isas) {
    const std::string path = folder + "/model.bin";
    const Described d = write_model(path, kind);
    const std::vector<float> expected = run(d, options_for(d, kExperts, 1, false, "scalar"), false, false);
    int wrong = expected.empty();
    for (const std::string& isa : isas)
        for (const int64_t cache : {int64_t{1}, int64_t{3}})
            for (const bool disturb : {false, true}) {
                EngineOptions options = options_for(d, cache, 2, cache == 1, isa);
                if (disturb) {
                    const auto middle = [&](int layer) { return d.store.experts[layer][5].up.weights.offset + 2000; };
                    options.store.hooks =
                        std::make_shared<FaultyReads>(std::vector<ReadFault>{{ReadFault::Kind::io_error, 0, middle(0), 0, 1},
                                                                             {ReadFault::Kind::io_error, 0, middle(2), 0, 2},
                                                                             {ReadFault::Kind::io_error, 0, middle(3), 0, 1}},
                                                      false);
                }
                const std::vector<float> found = run(d, options, disturb, disturb);
                const bool equal =
                    found.size() == expected.size() && !std::memcmp(found.data(), expected.data(), found.size() * sizeof(float));
                std::printf("%s %-12s cache %d%s: %s\n", kind == Kind::mla ? "MLA" : "GQA", isa.c_str(), static_cast<int>(cache),
                            disturb ? ", disturbed" : "", equal ? "equal" : "NOT equal");
                wrong += !equal;
            }
    // A checker that could not see a difference would be worth nothing.
    Described other = d;
    std::swap(other.store.experts[1][0], other.store.experts[1][1]);
    if (run(other, options_for(other, 1, 2, false, ""), false, false) == expected) {
        std::printf("two experts swapped: no difference seen\n");
        ++wrong;
    }
    ::unlink(path.c_str());
    return wrong;
}

}  // namespace
}  // namespace colibri

int main(int argc, char** argv) {
    std::string folder = argc > 1 ? argv[1] : (std::filesystem::temp_directory_path() / "engine_selftest.XXXXXX").string();
    if (argc <= 1 && !::mkdtemp(folder.data())) return 2;
    std::vector<std::string> isas = colibri::available_isas();
    if (argc > 2 && std::string(argv[2]) == "fastest") {
        isas = {isas.back()};
    } else {
        for (const std::string& isa : colibri::emulated_isas()) isas.push_back(isa);
    }
    const int wrong = colibri::check(folder, colibri::Kind::mla, isas) + colibri::check(folder, colibri::Kind::gqa, isas);
    if (argc <= 1) ::rmdir(folder.c_str());
    std::printf("%d wrong\n", wrong);
    return wrong != 0;
}
