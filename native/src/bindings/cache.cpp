// Python's view of the expert store: enough to test it from outside. The engine uses the C++ interface.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../io/faults.h"
#include "bindings.h"
#include "colibri/error.h"
#include "colibri/expert_store.h"
#include "colibri/repack.h"

namespace py = pybind11;

namespace colibri::bindings {
namespace {

Extent extent_from(const py::object& value) {
    if (value.is_none()) return {};
    const auto [file, offset, nbytes, tensor] = value.cast<std::tuple<int, uint64_t, uint64_t, std::string>>();
    return {file, offset, nbytes, tensor};
}

StoredMatrix matrix_from(const py::dict& d) {
    StoredMatrix m;
    m.rows = d["rows"].cast<int64_t>();
    m.cols = d["cols"].cast<int64_t>();
    m.bits = d["bits"].cast<int>();
    m.group_size = d["group_size"].cast<int64_t>();
    m.rows16 = d["rows16"].cast<bool>();
    m.scale_bytes = d["scale_bytes"].cast<int>();
    m.weights = extent_from(d["weights"]);
    m.scales = extent_from(d["scales"]);
    return m;
}

StoreOptions options_from(std::vector<std::string> files, const std::vector<std::vector<py::dict>>& experts, int64_t cache_experts,
                          int io_threads, bool direct) {
    StoreOptions options;
    options.files = std::move(files);
    for (const auto& layer : experts) {
        auto& into = options.experts.emplace_back();
        for (const py::dict& e : layer) into.push_back({matrix_from(e["gate"]), matrix_from(e["up"]), matrix_from(e["down"])});
    }
    options.cache_experts = cache_experts;
    options.io_threads = io_threads;
    options.direct = direct;
    return options;
}

}  // namespace

CachePolicy cache_policy_named(const std::string& name) {
    return named<CachePolicy>("cache_policy", name, {{"step_lfu", CachePolicy::step_lfu}, {"lru", CachePolicy::lru}});
}

ReadFault fault_from(const py::dict& d) {
    const auto number = [&](const char* key, uint64_t otherwise) { return d.contains(key) ? d[key].cast<uint64_t>() : otherwise; };
    return {fault_kind(d["kind"].cast<std::string>()), static_cast<int>(number("file", 0)), number("offset", 0), number("bytes", 0),
            static_cast<int>(number("times", 1))};
}

std::shared_ptr<FaultyReads> faulty_reads(const std::vector<py::dict>& list, bool reverse_completions) {
    std::vector<ReadFault> faults;
    for (const py::dict& d : list) faults.push_back(fault_from(d));
    return std::make_shared<FaultyReads>(std::move(faults), reverse_completions);
}

namespace {

using Pinned = std::vector<std::vector<int32_t>>;  // [layer]

// Members of the wrappers end in reverse order: lease, walk, store.
struct PyStore {
    std::shared_ptr<ExpertStore> store;
    std::vector<int64_t> sizes;           // rows16 bytes of gate, up, down
    std::shared_ptr<FaultyReads> faults;  // null without hooks

    FaultyReads& hooks() const {
        if (!faults)
            throw Error("EngineError", "the store was opened without hooks", "faults", "a list, which may be empty", "none");
        return *faults;
    }
};

struct PyLease {
    PyStore owner;
    std::optional<ExpertLease> lease;

    const ExpertLease& get() const {
        if (!lease) throw Error("EngineError", "the lease was released");
        return *lease;
    }
    py::bytes part(const uint8_t* data, size_t i) const {
        return {reinterpret_cast<const char*>(data), static_cast<size_t>(owner.sizes[i])};
    }
};

struct PyWalk {
    PyStore owner;
    std::optional<ExpertStore::Walk> walk;

    ~PyWalk() { close(); }
    PyWalk(PyStore owner, ExpertStore::Walk walk) : owner(std::move(owner)), walk(std::move(walk)) {}
    PyWalk(PyWalk&&) = default;

    void close() {
        if (!walk) return;
        const py::gil_scoped_release release;
        walk.reset();
    }
    PyLease next() {
        if (!walk) throw Error("EngineError", "the walk was closed");
        const py::gil_scoped_release release;
        return {owner, walk->next()};
    }
};

py::dict counters_of(const PyStore& self) {
    const StoreCounters c = self.store->counters();
    py::dict d;
    d["bytes_read"] = c.bytes_read;
    d["useful_bytes"] = c.useful_bytes;
    d["hits"] = c.hits;
    d["pinned_hits"] = c.pinned_hits;
    d["misses"] = c.misses;
    d["retries"] = c.retries;
    d["wait_seconds"] = c.wait_seconds;
    d["foreseen"] = c.foreseen;
    d["foreseeable"] = c.foreseeable;
    d["prefetch_useful_bytes"] = c.prefetch_useful_bytes;
    d["prefetch_wasted_bytes"] = c.prefetch_wasted_bytes;
    return d;
}

py::bytes repack(const py::buffer& weights, const py::buffer& scales, int64_t rows, int64_t cols, int bits, int64_t group_size) {
    StoredMatrix m;
    m.rows = rows;
    m.cols = cols;
    m.bits = bits;
    m.group_size = group_size;
    m.rows16 = false;
    const py::buffer_info w = weights.request(), s = scales.request();
    const auto check = [](const char* name, const py::buffer_info& info, int64_t expected) {
        const int64_t got = info.size * info.itemsize;
        if (info.ndim != 1 || (info.size && info.strides[0] != info.itemsize) || got != expected)
            throw Error("ShapeError", "row-major tensor", name, std::to_string(expected) + " bytes in a row", std::to_string(got));
    };
    check("weights", w, stored_weight_bytes(m));
    check("scales", s, stored_scale_bytes(m));
    std::string out(static_cast<size_t>(rows16_bytes(m)), '\0');
    repack_rows16(m, static_cast<const uint8_t*>(w.ptr), static_cast<const uint8_t*>(s.ptr),
                  reinterpret_cast<uint8_t*>(out.data()));
    return py::bytes(out);
}

}  // namespace

void bind_cache(py::module_& module) {
    py::class_<PyLease>(module, "ExpertLease", "An expert in memory; its slot is not reused before release().")
        .def_property_readonly("expert", [](const PyLease& self) { return self.get().expert(); })
        .def(
            "gate", [](const PyLease& self) { return self.part(self.get().gate(), 0); }, "Copy of the rows16 bytes.")
        .def(
            "up", [](const PyLease& self) { return self.part(self.get().up(), 1); }, "Copy of the rows16 bytes.")
        .def(
            "down", [](const PyLease& self) { return self.part(self.get().down(), 2); }, "Copy of the rows16 bytes.")
        .def("release", [](PyLease& self) { self.lease.reset(); }, "Gives the slot back; harmless twice.");

    py::class_<PyWalk>(module, "ExpertWalk", "Experts of one layer, handed out in order.")
        .def("next", &PyWalk::next, "The next expert as a lease; blocks until it is in memory.")
        .def("close", &PyWalk::close, "Ends the walk, also in its midst; harmless twice.");

    const auto memory_bytes = [](std::vector<std::string> files, const std::vector<std::vector<py::dict>>& experts,
                                 int64_t cache_experts, int io_threads, Pinned pinned) {
        StoreOptions options = options_from(std::move(files), experts, cache_experts, io_threads, true);
        options.pinned = std::move(pinned);
        return ExpertStore::memory_bytes(options);
    };
    py::class_<PyStore>(module, "ExpertStore", "Experts on disk and their cache. Tests only.")
        .def(py::init([](std::vector<std::string> files, const std::vector<std::vector<py::dict>>& experts, int64_t cache_experts,
                         int io_threads, bool direct, const std::optional<std::vector<py::dict>>& faults, bool reverse_completions,
                         Pinned pinned, const std::string& reader, bool pipe, int64_t prefetch_experts,
                         const std::string& cache_policy) {
                 StoreOptions options = options_from(std::move(files), experts, cache_experts, io_threads, direct);
                 options.pinned = std::move(pinned);
                 options.reader = reader_named(reader);
                 options.pipe = pipe;
                 options.prefetch_experts = prefetch_experts;
                 options.cache_policy = cache_policy_named(cache_policy);
                 PyStore self;
                 if (faults || reverse_completions)
                     options.hooks = self.faults = faulty_reads(faults.value_or(std::vector<py::dict>{}), reverse_completions);
                 if (!options.experts.empty() && !options.experts[0].empty()) {
                     const StoredExpert& e = options.experts[0][0];
                     self.sizes = {rows16_bytes(e.gate), rows16_bytes(e.up), rows16_bytes(e.down)};
                 }
                 self.store = std::make_shared<ExpertStore>(std::move(options));
                 return self;
             }),
             py::arg("files"), py::arg("experts"), py::kw_only(), py::arg("cache_experts") = 1, py::arg("io_threads") = 2,
             py::arg("direct") = true, py::arg("faults") = py::none(), py::arg("reverse_completions") = false,
             py::arg("pinned") = Pinned{}, py::arg("reader") = "auto", py::arg("pipe") = true, py::arg("prefetch_experts") = 0,
             py::arg("cache_policy") = "step_lfu")
        .def(
            "walk",
            [](const PyStore& self, int layer, const std::vector<int32_t>& ids) {
                return PyWalk(self, self.store->walk(layer, ids));
            },
            py::arg("layer"), py::arg("experts"))
        .def(
            "announce", [](const PyStore& self, int layer, const std::vector<int32_t>& ids) { self.store->announce(layer, ids); },
            py::arg("layer"), py::arg("experts"))
        .def("resident", [](const PyStore& self, int layer, int expert) { return self.store->resident(layer, expert); })
        .def(
            "by_rank", [](const PyStore& self, int layer) { return self.store->by_rank(layer); }, py::arg("layer"),
            "Residents that are not pinned, in the order in which they would go.")
        .def_property_readonly("free_slots", [](const PyStore& self) { return self.store->free_slots(); })
        .def(
            "add_fault", [](const PyStore& self, const py::dict& fault) { self.hooks().add(fault_from(fault)); }, py::arg("fault"),
            "A fault for reads to come; only where `faults` was given at construction.")
        .def("clear_faults", [](const PyStore& self) { self.hooks().clear(); })
        .def("counters", &counters_of)
        .def("wait_seconds", [](const PyStore& self) { return self.store->wait_seconds(); })
        .def_property_readonly("reader", [](const PyStore& self) { return self.store->reader(); })
        .def_property_readonly("slot_bytes", [](const PyStore& self) { return self.store->slot_bytes(); })
        .def_property_readonly("expert_file_bytes", [](const PyStore& self) { return self.store->expert_file_bytes(); })
        .def_static("memory_bytes", memory_bytes, py::arg("files"), py::arg("experts"), py::kw_only(), py::arg("cache_experts"),
                    py::arg("io_threads"), py::arg("pinned") = Pinned{});

    module.def("repack_rows16", &repack, py::arg("weights"), py::arg("scales"), py::kw_only(), py::arg("rows"), py::arg("cols"),
               py::arg("bits"), py::arg("group_size"),
               "rows16 bytes of a row-major matrix: quant.pack(quant.interleavable(matrix), 'rows16').");
}

}  // namespace colibri::bindings
