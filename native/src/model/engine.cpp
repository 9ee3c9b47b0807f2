// The engine: one step through all layers.
#include "colibri/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>

#include "attention.h"
#include "check_spec.h"
#include "colibri/error.h"
#include "moe.h"

namespace colibri {

namespace {

using Clock = std::chrono::steady_clock;

Resident resident_form(const std::string& role) {
    const auto ends_with = [&](const char* tail) { return role.ends_with(tail); };
    if (role == "embed" || ends_with(".kv_b") || ends_with(".wq_b") || ends_with(".wk")) return Resident::row_major;
    if (ends_with("norm") || ends_with("norm_weight") || ends_with("bias") || ends_with("router.weight") ||
        ends_with("weights_proj"))
        return Resident::f32;
    return Resident::rows16;
}

StoreCounters difference(const StoreCounters& after, const StoreCounters& before) {
    StoreCounters d = after;
    d.bytes_read -= before.bytes_read;
    d.useful_bytes -= before.useful_bytes;
    d.hits -= before.hits;
    d.misses -= before.misses;
    d.pinned_hits -= before.pinned_hits;
    d.retries -= before.retries;
    d.wait_seconds -= before.wait_seconds;
    d.foreseen -= before.foreseen;
    d.foreseeable -= before.foreseeable;
    d.prefetch_useful_bytes -= before.prefetch_useful_bytes;
    d.prefetch_wasted_bytes -= before.prefetch_wasted_bytes;
    return d;
}

}  // namespace

struct Engine::Impl {
    ModelSpec model;
    EngineOptions options;
    ThreadPool pool;
    Products products;
    Rope rope;
    Weights embed, final_norm, head;
    std::vector<std::unique_ptr<Attention>> attention;
    std::vector<FeedForward> feed_forward;
    std::unique_ptr<ExpertStore> store;
    AttentionScratch attention_scratch;
    FeedForwardScratch feed_forward_scratch;
    Activations head_input;
    Buffer<float> hidden;
    int64_t position = 0;
    std::vector<Selection> selections;
    StepReport report;
    PhaseClock clock;
    bool tracing = false;
    int64_t traced_inputs = kAllInputs;
    Trace trace;
    int64_t bytes_per_position = 0;
    bool rows_alone = false;  // of the step at hand

    Impl(ModelSpec m, EngineOptions o)
        : model((check_spec(m, o), std::move(m))),
          options(std::move(o)),
          pool(options.threads),
          products(kernels_for(options.isa), pool, options.quantised_activations),
          rope(model.attention.rope, options.context) {
        const std::vector<std::string>& files = options.store.files;
        const auto load = [&](const std::string& role) {
            return Weights(role, model.tensors.at(role), resident_form(role), files);
        };
        embed = load("embed");
        final_norm = load("final_norm");
        head = model.tied ? Weights("embed", model.tensors.at("embed"), Resident::rows16, files) : load("head");
        int64_t moe_layers = 0;
        attention.reserve(model.layers);
        feed_forward.reserve(model.layers);
        for (int64_t layer = 0; layer < model.layers; ++layer) {
            attention.push_back(Attention::make(model, layer, options.context, files));
            feed_forward.emplace_back(model, layer, model.sparse[layer] ? moe_layers++ : -1, files);
        }
        if (moe_layers) store = std::make_unique<ExpertStore>(options.store);
        attention_scratch.per_thread.resize(pool.threads());
        selections.resize(moe_layers);
        bytes_per_position = Engine::memory_plan(model, options).step_bytes_per_position;
    }

    void check(std::span<const int32_t> tokens, bool last_only) const {
        const int64_t n = static_cast<int64_t>(tokens.size());
        if (n < 1) throw Error("TokenError", "a step needs tokens", "tokens", "1 or more", "0");
        for (int64_t p = 0; p < n; ++p)
            if (tokens[p] < 0 || tokens[p] >= model.vocab)
                throw Error("TokenError", "token outside the vocabulary", "tokens[" + std::to_string(p) + "]",
                            "0 … " + std::to_string(model.vocab - 1), std::to_string(tokens[p]));
        if (position + n > options.context)
            throw Error("ContextOverflowError", "the step does not fit in the KV cache", "position " + std::to_string(position),
                        "at most " + std::to_string(options.context - position) + " tokens", std::to_string(n));
        if (!options.step_bytes) return;
        const int64_t logits = model.vocab * static_cast<int64_t>(sizeof(float)),
                      each = bytes_per_position + (last_only ? 0 : logits);
        const int64_t most = (options.step_bytes - (last_only ? logits : 0)) / each;
        if (n > most)
            throw Error("MemoryBudgetError", "the step needs more working memory than the bound leaves", "tokens",
                        "at most " + std::to_string(most) + " in one step", std::to_string(n));
    }

    RoutingOptions routing(int64_t moe_index, bool budget_acts) const {
        RoutingOptions routing = options.routing;
        routing.budget = budget_acts ? options.budgets.at(moe_index) : 0;
        if (!budget_acts) routing.coverage = 1.0;
        routing.rows_alone = rows_alone;
        return routing;
    }

    bool run(std::span<const int32_t> tokens, bool budget_acts, const std::function<bool()>& interrupted) {
        const int64_t n = static_cast<int64_t>(tokens.size()), width = model.width;
        hidden.reserve(n * width);
        for (int64_t p = 0; p < n; ++p) embed.row(products.kernels(), tokens[p], hidden.data() + p * width);
        attention_scratch.attended.clear();
        MoEContext context{products, store.get(), store ? &options.store.experts[0][0] : nullptr, clock, report, tracing};
        feed_forward_scratch.ahead_moe_index = -1;
        trace = {};
        for (int64_t layer = 0; layer < model.layers; ++layer) {
            if (interrupted()) return false;
            products.trace_layer = layer;
            products.trace = tracing && (traced_inputs == kAllInputs || traced_inputs == layer) ? &trace : nullptr;
            if (tracing) trace.hidden.emplace_back(hidden.data(), hidden.data() + n * width);
            try {
                run_layer(context, layer, n, budget_acts);
            } catch (const Error& error) {
                // Reads name their tensor; values do not know where they are.
                if (!error.kind.starts_with("NonFinite")) throw;
                throw Error(error.kind, error.rule, "layer " + std::to_string(layer) + ", " + error.where, error.expected,
                            error.got);
            }
        }
        products.trace = nullptr;
        if (tracing) trace.hidden.emplace_back(hidden.data(), hidden.data() + n * width);
        return true;
    }

    void run_layer(MoEContext& context, int64_t layer, int64_t n, bool budget_acts) {
        {
            const PhaseClock::Scope timed(clock, Phase::attention);
            attention[layer]->step(products, rope, attention_scratch, hidden.data(), n, position);
        }
        if (tracing) {
            trace.attended.push_back(attention_scratch.attended);
            trace.attended.back().resize(n);
        }
        FeedForward& ffn = feed_forward[layer];
        const bool sparse = ffn.sparse();
        Selection* selection = sparse ? &selections[ffn.moe_index()] : nullptr;
        std::optional<FeedForward::Next> next;
        if (options.store.prefetch_experts && layer + 1 < model.layers && model.sparse[layer + 1]) {
            const FeedForward& after = feed_forward[layer + 1];
            next = {&after, routing(after.moe_index(), budget_acts)};
        }
        ffn.step(context, feed_forward_scratch, sparse ? routing(ffn.moe_index(), budget_acts) : RoutingOptions{}, hidden.data(), n,
                 selection, next ? &*next : nullptr);
        if (tracing && sparse) {
            const float* logits = feed_forward_scratch.router_logits.data();
            trace.router_logits.emplace_back(logits, logits + n * model.experts);
        }
    }

    void score(int64_t n, bool last_only, float* logits) {
        const PhaseClock::Scope timed(clock, Phase::head);
        const int64_t first = last_only ? n - 1 : 0, width = model.width;
        float* normed = hidden.data() + first * width;
        for (int64_t p = first; p < n; ++p)
            products.kernels().rms_norm(hidden.data() + p * width, final_norm.f32(), model.rms_eps, width,
                                        hidden.data() + p * width);
        head_input.set(normed, n - first, width, "head input");
        products.multiply(head.view(), head_input, logits, model.vocab);
        for (int64_t i = 0; i < (n - first) * model.vocab; ++i)
            if (!std::isfinite(logits[i]))
                throw Error("NonFiniteLogitError", "the model scored a token with no number",
                            "position " + std::to_string(first + i / model.vocab) + " of the step, token " +
                                std::to_string(i % model.vocab),
                            "finite", std::to_string(logits[i]));
    }

    void account(Clock::time_point begin, const StoreCounters& before) {
        clock.enter(Phase::other);
        report.phase_seconds = clock.seconds();
        if (store) report.store = difference(store->counters(), before);
        report.wall_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    }
};

Engine::Engine(ModelSpec model, EngineOptions options) : impl_(std::make_unique<Impl>(std::move(model), std::move(options))) {}
Engine::~Engine() = default;

MemoryPlan Engine::memory_plan(const ModelSpec& m, const EngineOptions& o) {
    check_spec(m, o);
    MemoryPlan plan;
    for (const auto& [role, stored] : m.tensors) plan.dense_bytes += Weights::memory_bytes(stored, resident_form(role));
    if (m.tied) plan.dense_bytes += Weights::memory_bytes(m.tensors.at("embed"), Resident::rows16);
    for (int64_t layer = 0; layer < m.layers; ++layer) {
        plan.kv_cache_bytes += o.context * m.attention.cache_width() * 4;
        if (m.indexer.heads && m.indexer.full[layer]) plan.kv_cache_bytes += o.context * m.indexer.dim * 4;
    }
    const bool has_experts = std::find(m.sparse.begin(), m.sparse.end(), true) != m.sparse.end();
    plan.store_bytes = has_experts ? ExpertStore::memory_bytes(o.store) : 0;
    // Every float of a step may also stand quantised beside itself: one byte each, and two words per group of 16 or more.
    const int64_t floats = m.width + Attention::scratch_floats_per_position(m) + FeedForward::scratch_floats_per_position(m);
    const int64_t moe_layers = std::count(m.sparse.begin(), m.sparse.end(), true);
    // Ids and weights of every selection, here and in Python.
    plan.step_bytes_per_position = floats * 4 + floats * (16 + 8) / 16 + 2 * moe_layers * m.router.top_k * 8;
    // With float32 activations every thread dequantises one row block at a time.
    int64_t widest = has_experts ? std::max(m.width, m.expert_hidden) : m.width;
    for (const auto& [role, stored] : m.tensors)
        if (resident_form(role) == Resident::rows16) widest = std::max(widest, stored.cols);
    plan.fixed_bytes =
        Rope::memory_bytes(m.attention.rope, o.context) + o.threads * Attention::scratch_floats_per_thread(m, o.context) * 4 +
        (has_experts ? FeedForward::scratch_floats(m) * 4 : 0) + (o.quantised_activations ? 0 : o.threads * kRowBlock * widest * 4);
    return plan;
}

bool Engine::forward(std::span<const int32_t> tokens, bool budget_acts, bool last_only, float* logits,
                     const std::function<bool()>& interrupted, bool rows_alone) {
    Impl& self = *impl_;
    const Clock::time_point begin = Clock::now();
    self.report = {};
    self.rows_alone = rows_alone;
    self.check(tokens, last_only);
    self.clock.start();
    const StoreCounters before = self.store ? self.store->counters() : StoreCounters{};
    const int64_t n = static_cast<int64_t>(tokens.size());
    bool finished = false;
    try {
        finished = self.run(tokens, budget_acts, interrupted);
        if (finished) self.score(n, last_only, logits);
    } catch (...) {
        self.account(begin, before);
        throw;
    }
    if (finished) self.position += n;
    self.account(begin, before);
    return finished;
}

void Engine::rewind(int64_t positions) {
    if (positions < 0 || positions > impl_->position)
        throw Error("RewindError", "cannot drop more positions than there are", "rewind", "0 … " + std::to_string(impl_->position),
                    std::to_string(positions));
    impl_->position -= positions;
}

int64_t Engine::position() const { return impl_->position; }
const std::vector<Selection>& Engine::selections() const { return impl_->selections; }
const StepReport& Engine::report() const { return impl_->report; }
void Engine::set_trace(bool on, int64_t inputs) {
    impl_->tracing = on;
    impl_->traced_inputs = inputs;
}
const Trace& Engine::trace() const { return impl_->trace; }
std::string Engine::isa() const { return impl_->products.kernels().name; }
const ExpertStore* Engine::store() const { return impl_->store.get(); }

std::vector<float> Engine::kv_cache(int64_t layer) const {
    const float* rows = impl_->attention.at(layer)->cache().data();
    return {rows, rows + impl_->position * impl_->model.attention.cache_width()};
}

std::vector<float> Engine::index_keys(int64_t layer) const {
    const Indexer* indexer = impl_->attention.at(layer)->indexer();
    if (!indexer) return {};
    const float* rows = indexer->keys().data();
    return {rows, rows + impl_->position * indexer->dim()};
}

}  // namespace colibri
