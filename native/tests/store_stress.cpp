// Stress of the expert store for the sanitizers: random walks over a generated file, every byte checked. No Python.
//
// store_stress [walks, of all readers and policies] [folder]: one walking thread, one that only looks on, several I/O threads,
// every combination of reader, layout, cache, policy, pins and order of completion; faults and delays come and go on the way.
// Prints one line per combination, and why io_uring is left out where it is; exits with 1 at the first wrong byte, and where a
// delayed read was never overtaken.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../src/io/faults.h"
#include "colibri/error.h"
#include "colibri/expert_store.h"
#include "colibri/repack.h"

namespace colibri {
namespace {

constexpr int kLayers = 3, kExperts = 12;
constexpr int64_t kHidden = 200, kWidth = 72;

struct Generated {
    StoreOptions options;
    // rows16 bytes [layer][expert][gate, up, down]
    std::vector<std::vector<std::vector<std::vector<uint8_t>>>> expected;
};

struct Form {
    const char* name;
    int bits;
    int64_t group;
    bool rows16;
    int scale_bytes;
    bool scattered;
};

class Writer {
  public:
    Writer(const std::string& path, uint64_t seed) : out_(path, std::ios::binary), random_(seed) { pad(3 * 4096 + 8); }

    void pad(uint64_t count) { write(bytes(count)); }
    std::vector<uint8_t> bytes(uint64_t count) {
        std::vector<uint8_t> data(count);
        for (uint8_t& byte : data) byte = static_cast<uint8_t>(random_());
        return data;
    }
    void write(const std::vector<uint8_t>& data) {
        out_.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
        at_ += data.size();
    }
    Extent extent(uint64_t nbytes, const std::string& name) const { return {0, at_, nbytes, name}; }

  private:
    std::ofstream out_;
    std::mt19937_64 random_;
    uint64_t at_ = 0;
};

// Scales are random bytes too: the store moves them and never computes with them.
StoredMatrix write_matrix(Writer& writer, const Form& form, int64_t rows, int64_t cols, const std::string& name,
                          std::vector<uint8_t>& expected) {
    StoredMatrix m{rows, cols, form.bits, form.group, form.rows16, form.scale_bytes, {}, {}};
    if (form.scattered) writer.pad(30000);
    const std::vector<uint8_t> weights = writer.bytes(static_cast<uint64_t>(stored_weight_bytes(m)));
    const std::vector<uint8_t> scales = writer.bytes(static_cast<uint64_t>(stored_scale_bytes(m)));
    m.weights = writer.extent(weights.size(), name);
    writer.write(weights);
    if (form.scattered) writer.pad(30000);
    if (!scales.empty()) m.scales = writer.extent(scales.size(), name + ".qs");
    writer.write(scales);
    expected = weights;
    if (!form.rows16) {
        expected.assign(static_cast<size_t>(rows16_bytes(m)), 0);
        repack_rows16(m, weights.data(), scales.data(), expected.data());
    }
    return m;
}

Generated generate(const std::string& path, const Form& form) {
    Generated g;
    g.options.files = {path};
    Writer writer(path, 7);
    for (int layer = 0; layer < kLayers; ++layer) {
        g.options.experts.emplace_back();
        g.expected.emplace_back();
        for (int expert = 0; expert < kExperts; ++expert) {
            const std::string name = std::to_string(layer) + "." + std::to_string(expert);
            auto& parts = g.expected.back().emplace_back(3);
            StoredExpert e;
            e.gate = write_matrix(writer, form, kWidth, kHidden, name + ".gate", parts[0]);
            e.up = write_matrix(writer, form, kWidth, kHidden, name + ".up", parts[1]);
            e.down = write_matrix(writer, form, kHidden, kWidth, name + ".down", parts[2]);
            g.options.experts.back().push_back(e);
        }
    }
    return g;
}

void fail(const std::string& what) {
    std::fprintf(stderr, "store_stress: %s\n", what.c_str());
    std::exit(1);
}

void check(const Generated& g, int layer, int expert, const ExpertLease& lease) {
    if (lease.expert() != expert) fail("another expert than asked for");
    const auto& parts = g.expected[static_cast<size_t>(layer)][static_cast<size_t>(expert)];
    const uint8_t* got[] = {lease.gate(), lease.up(), lease.down()};
    for (size_t i = 0; i < 3; ++i)
        if (std::memcmp(got[i], parts[i].data(), parts[i].size()))
            fail("wrong bytes of layer " + std::to_string(layer) + ", expert " + std::to_string(expert));
}

struct Held {
    int layer, expert;
    ExpertLease lease;
};

// Asks the store what any thread may ask, for as long as it lives.
class Onlooker {
  public:
    explicit Onlooker(const ExpertStore& store) : thread_([this, &store] { look(store); }) {}
    ~Onlooker() {
        done_ = true;
        thread_.join();
    }

  private:
    void look(const ExpertStore& store) {
        uint64_t before = 0;
        for (int i = 0; !done_; ++i) {
            const StoreCounters c = store.counters();
            const uint64_t handed = c.hits + c.misses;
            if (handed < before || c.pinned_hits > c.hits) fail("counters that went back");
            before = handed;
            if (store.by_rank(i % kLayers).size() > kExperts || store.free_slots() < 0) fail("more residents than experts");
            std::this_thread::yield();
        }
    }

    std::atomic<bool> done_{false};
    std::thread thread_;
};

// In one of six walks a read of some expert is late, interrupted, short or fails.
void disturb(FaultyReads& faults, const StoredExpert& expert, std::mt19937_64& random) {
    using Kind = ReadFault::Kind;
    if (random() % 6) return;
    const uint64_t inside = expert.up.weights.offset + expert.up.weights.nbytes / 2;
    const ReadFault choices[] = {{Kind::delay, 0, inside, 300, 1},  {Kind::interrupted, 0, inside, 0, 2},
                                 {Kind::again, 0, inside, 0, 2},    {Kind::short_read, 0, inside, 4196, 2},
                                 {Kind::io_error, 0, inside, 0, 1}, {Kind::invalid, 0, inside, 0, 1}};
    faults.add(choices[random() % std::size(choices)]);
}

// Random walks, some ended early, leases held over later hand-outs and walks. Returns the number of failed reads.
int stress(ExpertStore& store, FaultyReads& faults, const Generated& g, int walks, uint64_t seed) {
    const Onlooker onlooker(store);
    std::mt19937_64 random(seed);
    std::deque<Held> held;
    int failures = 0;
    for (int i = 0; i < walks; ++i) {
        const int layer = static_cast<int>(random() % kLayers);
        std::vector<int32_t> ids(kExperts);
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random);
        ids.resize(random() % (kExperts + 1));
        const size_t taken = random() % 4 ? ids.size() : random() % (ids.size() + 1);
        disturb(faults, g.options.experts[static_cast<size_t>(layer)][random() % kExperts], random);
        auto walk = std::make_unique<ExpertStore::Walk>(store.walk(layer, ids));
        for (size_t k = 0; k < taken; ++k) {
            try {
                held.push_back({layer, ids[k], walk->next()});
                check(g, layer, ids[k], held.back().lease);
            } catch (const Error& error) {
                if (error.kind != "ReadError") throw;
                ++failures;
            }
            while (held.size() > random() % 3) {
                check(g, held.front().layer, held.front().expert, held.front().lease);
                held.pop_front();
            }
        }
        // The store is asked while reads run.
        if (store.resident(layer, 0) && store.counters().bytes_read == 0) fail("a resident expert that was never read");
    }
    return failures;
}

// A read that began later than the next one is also told later: the next expert is in memory when the first is handed out.
void check_overtaking(const Generated& g, ReaderKind reader) {
    const auto faults = std::make_shared<FaultyReads>(std::vector<ReadFault>{}, false);
    StoreOptions options = g.options;
    options.hooks = faults;
    options.reader = reader;
    ExpertStore store(options);
    for (int tries = 0; tries < 200; ++tries) {
        const int first = tries % kExperts;
        const StoredExpert& late = options.experts[0][static_cast<size_t>(first)];
        faults->add({ReadFault::Kind::delay, 0, late.up.weights.offset + late.up.weights.nbytes / 2, ReadFault::kLongestDelay, 1});
        const uint64_t before = store.counters().useful_bytes;
        ExpertStore::Walk walk = store.walk(0, std::vector<int32_t>{first, (first + 1) % kExperts});
        const ExpertLease lease = walk.next();
        if (store.counters().useful_bytes - before == 2 * static_cast<uint64_t>(store.expert_file_bytes())) return;
    }
    fail("no read overtook a delayed one");
}

void run_one(const Form& form, const Generated& g, StoreOptions options, bool reverse, int walks) {
    using Kind = ReadFault::Kind;
    const auto cache_experts = static_cast<int>(options.cache_experts);
    options.io_threads = 1 + cache_experts % 4;
    if (cache_experts == 5) options.pinned = {{0, 7}, {}, {4}};
    const uint64_t middle = g.options.experts[1][4].up.weights.offset + 4096;
    const auto faults = std::make_shared<FaultyReads>(
        std::vector<ReadFault>{
            {Kind::io_error, 0, middle, 0, 2}, {Kind::short_read, 0, middle, 4196, 3}, {Kind::interrupted, 0, middle, 0, 3}},
        reverse);
    options.hooks = faults;
    ExpertStore store(options);
    const int failures = stress(store, *faults, g, walks, static_cast<uint64_t>(cache_experts));
    const StoreCounters c = store.counters();
    if (c.hits + c.misses == 0 || c.useful_bytes < c.misses * static_cast<uint64_t>(store.expert_file_bytes()))
        fail("counters that contradict each other");
    std::printf("%-22s %-50s cache %2d, %-8s, reversed %d: %llu hits, %llu misses, %d failed reads\n", form.name,
                store.reader().c_str(), cache_experts, options.cache_policy == CachePolicy::lru ? "lru" : "step_lfu", reverse,
                static_cast<unsigned long long>(c.hits), static_cast<unsigned long long>(c.misses), failures);
}

void run(const std::string& path, int walks) {
    const Form forms[] = {{"rows16 int4", 4, 64, true, 4, false},         {"rows16 int4 f16", 4, 64, true, 2, false},
                          {"rows16 int8 scattered", 8, 0, true, 4, true}, {"int4 groups", 4, 48, false, 4, false},
                          {"int4 rows scattered", 4, 0, false, 4, true},  {"int8 rows", 8, 0, false, 4, false}};
    std::vector<ReaderKind> readers = {ReaderKind::pread, ReaderKind::uring};
    if (const std::string refusal = uring_refusal(); !refusal.empty()) {
        std::printf("without io_uring: %s\n", refusal.c_str());
        readers.pop_back();
    }
    const int each = walks / static_cast<int>(2 * readers.size());
    for (const Form& form : forms) {
        const Generated g = generate(path, form);
        for (const ReaderKind reader : readers) {
            check_overtaking(g, reader);
            for (const bool direct : {true, false})
                for (const bool reverse : {false, true})
                    for (const int cache_experts : {1, 5, kExperts})
                        for (const CachePolicy policy : {CachePolicy::step_lfu, CachePolicy::lru}) {
                            StoreOptions options = g.options;
                            options.direct = direct;
                            options.reader = reader;
                            options.cache_experts = cache_experts;
                            options.cache_policy = policy;
                            run_one(form, g, options, reverse, each);
                        }
        }
    }
}

}  // namespace
}  // namespace colibri

int main(int argc, char** argv) {
    const int walks = argc > 1 ? std::atoi(argv[1]) : 60;
    const std::string path = std::string(argc > 2 ? argv[2] : ".") + "/store_stress-" + std::to_string(getpid()) + ".bin";
    try {
        colibri::run(path, walks);
    } catch (const std::exception& error) {
        std::remove(path.c_str());
        std::fprintf(stderr, "store_stress: %s\n", error.what());
        return 1;
    }
    std::remove(path.c_str());
    return 0;
}
