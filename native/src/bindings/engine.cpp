// Python's view of the engine: dictionaries in, arrays out, the GIL released while a step runs.
#include "colibri/engine.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <span>
#include <variant>

#include "../io/faults.h"
#include "bindings.h"
#include "colibri/error.h"
#include "colibri/kernels.h"

namespace py = pybind11;

namespace colibri::bindings {

namespace {

template <typename T>
T get(const py::dict& d, const char* key) {
    return d[key].cast<T>();
}

Extent extent_from(const py::object& object) {
    if (object.is_none()) return {};
    const auto t = object.cast<py::tuple>();
    return {t[0].cast<int>(), t[1].cast<uint64_t>(), t[2].cast<uint64_t>(), t[3].cast<std::string>()};
}

// (rows, cols, bits, group size, rows16, bytes of a scale, weights, scales or None); an extent is (file, offset, bytes, name).
StoredMatrix matrix_from(const py::handle& object) {
    const auto t = object.cast<py::tuple>();
    return {t[0].cast<int64_t>(), t[1].cast<int64_t>(), t[2].cast<int>(),  t[3].cast<int64_t>(),
            t[4].cast<bool>(),    t[5].cast<int>(),     extent_from(t[6]), extent_from(t[7])};
}

RopeSpec rope_from(const py::dict& d) {
    RopeSpec spec;
    spec.dim = get<int64_t>(d, "dim");
    spec.theta = get<double>(d, "theta");
    spec.interleaved = get<bool>(d, "interleaved");
    spec.attention_factor = get<double>(d, "attention_factor");
    if (!d["yarn"].is_none()) {
        const py::dict yarn = d["yarn"];
        spec.yarn.factor = get<double>(yarn, "factor");
        spec.yarn.original_positions = get<double>(yarn, "original_positions");
        spec.yarn.beta_fast = get<double>(yarn, "beta_fast");
        spec.yarn.beta_slow = get<double>(yarn, "beta_slow");
        spec.yarn.truncate = get<bool>(yarn, "truncate");
    }
    return spec;
}

AttentionSpec attention_from(const py::dict& d) {
    AttentionSpec spec;
    spec.heads = get<int64_t>(d, "heads");
    spec.scale = get<float>(d, "scale");
    spec.rope = rope_from(d["rope"]);
    if (get<std::string>(d, "kind") == "mla") {
        spec.kind = MlaSpec{get<int64_t>(d, "q_rank"), get<int64_t>(d, "kv_rank"), get<int64_t>(d, "nope"),
                            get<int64_t>(d, "value"), get<float>(d, "latent_eps")};
    } else {
        GqaSpec gqa;
        gqa.kv_heads = get<int64_t>(d, "kv_heads");
        gqa.head_dim = get<int64_t>(d, "head_dim");
        gqa.qkv_bias = get<bool>(d, "qkv_bias");
        const auto norm = get<std::string>(d, "qk_norm");
        gqa.qk_norm = norm == "head" ? QkNorm::head : norm == "width" ? QkNorm::width : QkNorm::none;
        gqa.clip = get<float>(d, "clip");
        spec.kind = gqa;
    }
    return spec;
}

IndexerSpec indexer_from(const py::dict& d) {
    IndexerSpec spec;
    spec.heads = get<int64_t>(d, "heads");
    spec.dim = get<int64_t>(d, "dim");
    spec.topk = get<int64_t>(d, "topk");
    spec.eps = get<float>(d, "eps");
    spec.full = get<std::vector<bool>>(d, "full");
    return spec;
}

RouterSpec router_from(const py::dict& d) {
    RouterSpec spec;
    spec.score = score_named(get<std::string>(d, "score"));
    spec.top_k = get<int>(d, "top_k");
    spec.n_group = get<int>(d, "n_group");
    spec.topk_group = get<int>(d, "topk_group");
    spec.norm_topk_prob = get<bool>(d, "norm_topk_prob");
    spec.routed_scaling_factor = get<double>(d, "routed_scaling_factor");
    return spec;
}

ModelSpec model_from(const py::dict& d) {
    ModelSpec m;
    m.vocab = get<int64_t>(d, "vocab");
    m.width = get<int64_t>(d, "width");
    m.layers = get<int64_t>(d, "layers");
    m.dense_hidden = get<int64_t>(d, "dense_hidden");
    m.sparse = get<std::vector<bool>>(d, "sparse");
    m.rms_eps = get<float>(d, "rms_eps");
    m.attention = attention_from(d["attention"]);
    if (!d["indexer"].is_none()) m.indexer = indexer_from(d["indexer"]);
    m.experts = get<int64_t>(d, "experts");
    m.expert_hidden = get<int64_t>(d, "expert_hidden");
    m.shared_hidden = get<int64_t>(d, "shared_hidden");
    m.router = router_from(d["router"]);
    m.tied = get<bool>(d, "tied");
    m.mtp = get<bool>(d, "mtp");
    for (const auto& [role, stored] : d["tensors"].cast<py::dict>()) m.tensors[role.cast<std::string>()] = matrix_from(stored);
    return m;
}

void set_routing(EngineOptions& o, const py::dict& d) {
    o.routing.expert_topk = get<int>(d, "expert_topk");
    o.routing.expert_topp = get<double>(d, "expert_topp");
    o.routing.policy = policy_named(get<std::string>(d, "policy"));
    o.routing.denominator = denominator_named(get<std::string>(d, "denominator"));
    o.routing.vote = vote_named(get<std::string>(d, "vote"));
    o.routing.floor = get<int>(d, "floor");
    o.routing.coverage = get<double>(d, "coverage");
    o.routing.route_top = get<int>(d, "route_top");
    o.routing.route_within = get<int>(d, "route_within");
    o.budgets = get<std::vector<int64_t>>(d, "budgets");
}

EngineOptions options_from(const py::dict& d) {
    EngineOptions o;
    o.store.files = get<std::vector<std::string>>(d, "files");
    for (const py::handle layer : d["experts"].cast<py::list>()) {
        o.store.experts.emplace_back();
        for (const py::handle expert : layer.cast<py::list>()) {
            const auto parts = expert.cast<py::tuple>();
            o.store.experts.back().push_back({matrix_from(parts[0]), matrix_from(parts[1]), matrix_from(parts[2])});
        }
    }
    o.store.cache_experts = get<int64_t>(d, "cache_experts");
    o.store.io_threads = get<int>(d, "io_threads");
    o.store.direct = get<bool>(d, "direct");
    o.store.reader = reader_named(get<std::string>(d, "reader"));
    o.store.cache_policy = cache_policy_named(get<std::string>(d, "cache_policy"));
    o.store.pinned = get<std::vector<std::vector<int32_t>>>(d, "pinned");
    o.store.pipe = get<bool>(d, "pipe");
    o.store.prefetch_experts = get<int64_t>(d, "prefetch_experts");
    if (d.contains("faults")) o.store.hooks = faulty_reads(d["faults"].cast<std::vector<py::dict>>(), false);  // tests only
    o.context = get<int64_t>(d, "context");
    o.threads = get<int>(d, "threads");
    o.isa = get<std::string>(d, "isa");
    o.quantised_activations = get<bool>(d, "quantised_activations");
    o.step_bytes = get<int64_t>(d, "step_bytes");
    set_routing(o, d["routing"]);
    return o;
}

py::dict report_dict(const StepReport& r) {
    py::dict d;
    d["wall_seconds"] = r.wall_seconds;
    const char* names[kPhases] = {"disk_wait_seconds", "experts_seconds", "attention_seconds", "head_seconds", "other_seconds"};
    for (int i = 0; i < kPhases; ++i) d[names[i]] = r.phase_seconds[i];
    d["bytes_read"] = r.store.bytes_read;
    d["useful_bytes"] = r.store.useful_bytes;
    d["cache_hits"] = r.store.hits;
    d["cache_misses"] = r.store.misses;
    d["foreseen_experts"] = r.store.foreseen;
    d["foreseeable_experts"] = r.store.foreseeable;
    d["prefetch_useful_bytes"] = r.store.prefetch_useful_bytes;
    d["prefetch_wasted_bytes"] = r.store.prefetch_wasted_bytes;
    d["avoided_read_bytes_estimate"] = r.avoided_read_bytes_estimate;
    return d;
}

py::dict plan_dict(const MemoryPlan& p) {
    py::dict d;
    d["dense_bytes"] = p.dense_bytes;
    d["kv_cache_bytes"] = p.kv_cache_bytes;
    d["store_bytes"] = p.store_bytes;
    d["step_bytes_per_position"] = p.step_bytes_per_position;
    d["fixed_bytes"] = p.fixed_bytes;
    return d;
}

// An Engine and the shape facts that its arrays need.
class PyEngine {
  public:
    PyEngine(const py::dict& model, const py::dict& options) {
        ModelSpec spec = model_from(model);
        vocab_ = spec.vocab;
        width_ = spec.width;
        experts_ = spec.experts;
        cache_width_ = spec.attention.cache_width();
        index_dim_ = spec.indexer.dim;
        EngineOptions engine_options = options_from(options);
        const py::gil_scoped_release release;
        engine_ = std::make_unique<Engine>(std::move(spec), std::move(engine_options));
    }

    py::array_t<float> forward(const py::array_t<int32_t, py::array::c_style>& tokens, bool budget_acts, bool last_only,
                               bool rows_alone, const std::optional<py::array_t<int64_t, py::array::c_style>>& row_votes) {
        const std::span<const int32_t> view(tokens.data(), static_cast<size_t>(tokens.size()));
        std::span<const int64_t> votes;
        if (row_votes) votes = {row_votes->data(), static_cast<size_t>(row_votes->size())};
        return scored(last_only ? 1 : tokens.size(), [&](float* out) {
            return engine_->forward(view, budget_acts, last_only, out, interrupted, rows_alone, votes);
        });
    }

    // `hidden` is float32 [n][width], or the first of n rows of the last forward's, which then stay where they are.
    py::array_t<float> mtp_forward(const py::array_t<int32_t, py::array::c_style>& tokens_next,
                                   const std::variant<int64_t, py::array_t<float, py::array::c_style>>& hidden, bool budget_acts,
                                   bool last_only, bool rows_alone) {
        const std::span<const int32_t> view(tokens_next.data(), static_cast<size_t>(tokens_next.size()));
        const auto* given = std::get_if<py::array_t<float, py::array::c_style>>(&hidden);
        const float* rows = given ? given->data() : engine_->hidden().data() + std::get<int64_t>(hidden) * width_;
        return scored(last_only ? 1 : tokens_next.size(), [&](float* out) {
            return engine_->mtp_forward(view, rows, budget_acts, last_only, out, interrupted, rows_alone);
        });
    }

    void reroute(const py::dict& described) {
        EngineOptions options;
        set_routing(options, described);
        engine_->reroute(options.routing, std::move(options.budgets));
    }

    py::array_t<float> hidden() const { return rows_of(engine_->hidden()); }
    py::array_t<float> mtp_hidden() const { return rows_of(engine_->mtp_hidden()); }

    py::list selections() const {
        py::list list;
        for (const Selection& s : engine_->selections()) list.append(selection_dict(s));
        return list;
    }

    py::dict trace() const {
        const Trace& t = engine_->trace();
        py::list hidden, router_logits;
        for (const auto& h : t.hidden) hidden.append(to_array(h, {static_cast<py::ssize_t>(h.size()) / width_, width_}));
        for (const auto& z : t.router_logits)
            router_logits.append(to_array(z, {static_cast<py::ssize_t>(z.size()) / experts_, experts_}));
        py::list inputs;
        for (const TracedInput& input : t.inputs) {
            const py::ssize_t rows = static_cast<py::ssize_t>(input.rows.size());
            inputs.append(
                py::make_tuple(input.layer, input.what, to_array(input.rows, {rows}), to_array(input.values, {rows, input.cols})));
        }
        py::dict d;
        d["inputs"] = inputs;
        d["hidden"] = hidden;
        d["router_logits"] = router_logits;
        d["attended"] = t.attended;
        return d;
    }

    py::array_t<float> kv_cache(int64_t layer) const {
        return to_array(engine_->kv_cache(layer), {engine_->position(), cache_width_});
    }

    py::object index_keys(int64_t layer) const {
        const std::vector<float> keys = engine_->index_keys(layer);
        if (keys.empty()) return py::none();
        return to_array(keys, {engine_->position(), index_dim_});
    }

    Engine& engine() { return *engine_; }

  private:
    static bool interrupted() {
        const py::gil_scoped_acquire acquire;
        return PyErr_CheckSignals() != 0;
    }

    // The logits that `step` writes without the GIL; the signal's exception where it was interrupted.
    template <typename Step>
    py::array_t<float> scored(py::ssize_t rows, const Step& step) {
        py::array_t<float> logits({rows, vocab_});
        float* out = logits.mutable_data();
        bool finished = false;
        {
            const py::gil_scoped_release release;
            finished = step(out);
        }
        if (!finished) throw py::error_already_set();
        return logits;
    }

    py::array_t<float> rows_of(std::span<const float> values) const {
        return py::array_t<float>({static_cast<py::ssize_t>(values.size()) / width_, width_}, values.data());
    }

    py::ssize_t vocab_ = 0, width_ = 0, experts_ = 0, cache_width_ = 0, index_dim_ = 0;
    std::unique_ptr<Engine> engine_;
};

}  // namespace

void bind_engine(py::module_& module) {
    module.def(
        "memory_plan",
        [](const py::dict& model, const py::dict& options) {
            return plan_dict(Engine::memory_plan(model_from(model), options_from(options)));
        },
        "Bytes that an engine of these descriptions takes, by part.");
    py::class_<PyEngine>(module, "Engine")
        .def(py::init<const py::dict&, const py::dict&>())
        .def("forward", &PyEngine::forward, py::arg("tokens"), py::arg("budget_acts"), py::arg("last_only"),
             py::arg("rows_alone") = false, py::arg("row_votes") = py::none())
        .def("reroute", &PyEngine::reroute)
        .def("rewind", [](PyEngine& self, int64_t n) { self.engine().rewind(n); })
        .def_property_readonly("position", [](PyEngine& self) { return self.engine().position(); })
        .def_property_readonly("selections", &PyEngine::selections)
        .def_property_readonly("hidden", &PyEngine::hidden)
        .def("mtp_forward", &PyEngine::mtp_forward, py::arg("tokens_next"), py::arg("hidden"), py::arg("budget_acts"),
             py::arg("last_only"), py::arg("rows_alone") = false)
        .def("mtp_rewind", [](PyEngine& self, int64_t n) { self.engine().mtp_rewind(n); })
        .def_property_readonly("mtp_position", [](PyEngine& self) { return self.engine().mtp_position(); })
        .def_property_readonly("mtp_hidden", &PyEngine::mtp_hidden)
        .def_property_readonly("mtp_selection", [](PyEngine& self) { return selection_dict(self.engine().mtp_selection()); })
        .def_property_readonly("report", [](PyEngine& self) { return report_dict(self.engine().report()); })
        .def(
            "set_trace",
            [](PyEngine& self, bool on, std::optional<int64_t> inputs) {
                self.engine().set_trace(on, inputs.value_or(Engine::kNoInputs));
            },
            py::arg("on"), py::arg("inputs") = Engine::kAllInputs)
        .def_property_readonly("trace", &PyEngine::trace)
        .def("kv_cache", &PyEngine::kv_cache)
        .def("index_keys", &PyEngine::index_keys)
        .def_property_readonly("isa", [](PyEngine& self) { return self.engine().isa(); })
        .def_property_readonly("reader",
                               [](PyEngine& self) { return self.engine().store() ? self.engine().store()->reader() : ""; })
        .def_property_readonly(
            "expert_bytes", [](PyEngine& self) { return self.engine().store() ? self.engine().store()->expert_file_bytes() : 0; });
}

}  // namespace colibri::bindings
