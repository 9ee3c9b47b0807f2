// The engine: one step through all layers.
#include "colibri/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "attention.h"
#include "check_spec.h"
#include "colibri/error.h"
#include "moe.h"
#include "mtp.h"

namespace colibri {

namespace {

using Clock = std::chrono::steady_clock;

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

// What `compute` throws of values names their layer: unlike reads, which name their tensor, they do not know where they are.
template <typename Compute>
void in_layer(int64_t layer, const Compute& compute) {
    try {
        compute();
    } catch (const Error& error) {
        if (!error.kind.starts_with("NonFinite")) throw;
        throw Error(error.kind, error.rule, "layer " + std::to_string(layer) + ", " + error.where, error.expected, error.got);
    }
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
    std::unique_ptr<MtpBlock> mtp;  // null where it was not asked for
    std::unique_ptr<ExpertStore> store;
    AttentionScratch attention_scratch;
    FeedForwardScratch feed_forward_scratch;
    Activations head_input;
    Buffer<float> hidden, kept_hidden;  // of the step at work; of the last finished one, after the final norm
    int64_t kept_rows = 0;
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
        if (model.mtp) mtp = std::make_unique<MtpBlock>(model, options.context, files);
        if (model.store_layers()) store = std::make_unique<ExpertStore>(options.store);
        attention_scratch.per_thread.resize(pool.threads());
        selections.resize(moe_layers);
        bytes_per_position = Engine::memory_plan(model, options).step_bytes_per_position;
    }

    void check(std::span<const int32_t> tokens, int64_t start, bool last_only) const {
        const int64_t n = static_cast<int64_t>(tokens.size());
        if (n < 1) throw Error("TokenError", "a step needs tokens", "tokens", "1 or more", "0");
        for (int64_t p = 0; p < n; ++p)
            if (tokens[p] < 0 || tokens[p] >= model.vocab)
                throw Error("TokenError", "token outside the vocabulary", "tokens[" + std::to_string(p) + "]",
                            "0 … " + std::to_string(model.vocab - 1), std::to_string(tokens[p]));
        if (start + n > options.context)
            throw Error("ContextOverflowError", "the step does not fit in the KV cache", "position " + std::to_string(start),
                        "at most " + std::to_string(options.context - start) + " tokens", std::to_string(n));
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
        if (!budget_acts) routing.route_within = 0;
        routing.rows_alone = rows_alone;
        return routing;
    }

    bool run(std::span<const int32_t> tokens, bool budget_acts, std::span<const int64_t> row_votes,
             const std::function<bool()>& interrupted) {
        const int64_t n = static_cast<int64_t>(tokens.size()), width = model.width;
        hidden.reserve(n * width);
        for (int64_t p = 0; p < n; ++p) embed.row(products.kernels(), tokens[p], hidden.data() + p * width);
        attention_scratch.attended.clear();
        MoEContext context{products, store.get(), nullptr, clock, report, tracing, row_votes};
        feed_forward_scratch.ahead_moe_index = -1;
        trace = {};
        for (int64_t layer = 0; layer < model.layers; ++layer) {
            if (interrupted()) return false;
            products.trace_layer = layer;
            products.trace = tracing && (traced_inputs == kAllInputs || traced_inputs == layer) ? &trace : nullptr;
            if (tracing) trace.hidden.emplace_back(hidden.data(), hidden.data() + n * width);
            in_layer(layer, [&] { run_layer(context, layer, n, budget_acts); });
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
        context.shape = sparse ? &options.store.experts[ffn.moe_index()][0] : nullptr;
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

    bool draft(std::span<const int32_t> tokens_next, const float* trunk, bool budget_acts, bool last_only, float* logits,
               const std::function<bool()>& interrupted) {
        if (interrupted()) return false;
        const int64_t n = static_cast<int64_t>(tokens_next.size());
        products.trace = nullptr;
        feed_forward_scratch.ahead_moe_index = -1;
        MoEContext context{products, store.get(), &options.store.experts.back()[0], clock, report, false};
        const MtpBlock::Shared shared{embed, rope, attention_scratch, feed_forward_scratch};
        const RoutingOptions block = routing(model.moe_layers(), budget_acts);
        const float* normed = nullptr;
        in_layer(model.layers, [&] { normed = mtp->step(context, shared, block, tokens_next, trunk); });
        if (interrupted()) return false;
        score(normed, n, last_only, logits);
        mtp->commit(n);
        return true;
    }

    // The rows that went through all layers, in place.
    const float* normed_hidden(int64_t n) {
        for (int64_t p = 0; p < n; ++p) {
            float* row = hidden.data() + p * model.width;
            products.kernels().rms_norm(row, final_norm.f32(), model.rms_eps, model.width, row);
        }
        return hidden.data();
    }

    void score(const float* normed, int64_t n, bool last_only, float* logits) {
        const PhaseClock::Scope timed(clock, Phase::head);
        const int64_t first = last_only ? n - 1 : 0, width = model.width;
        head_input.set(normed + first * width, n - first, width, "head input");
        products.multiply(head.view(), head_input, logits, model.vocab);
        for (int64_t i = 0; i < (n - first) * model.vocab; ++i)
            if (!std::isfinite(logits[i]))
                throw Error("NonFiniteLogitError", "the model scored a token with no number",
                            "position " + std::to_string(first + i / model.vocab) + " of the step, token " +
                                std::to_string(i % model.vocab),
                            "finite", std::to_string(logits[i]));
    }

    // Runs a step that has been checked, and reports what it did whether or not it finished.
    template <typename Compute>
    bool reported(Clock::time_point begin, const Compute& compute) {
        clock.start();
        const StoreCounters before = store ? store->counters() : StoreCounters{};
        const auto account = [&] {
            clock.enter(Phase::other);
            report.phase_seconds = clock.seconds();
            if (store) report.store = difference(store->counters(), before);
            report.wall_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
        };
        bool finished = false;
        try {
            finished = compute();
        } catch (...) {
            account();
            throw;
        }
        account();
        return finished;
    }

    MtpBlock& block() const {
        if (!mtp)
            throw Error("ConfigError", "no MTP block in memory", "mtp", "a container that has one, loaded with mtp=True", "none");
        return *mtp;
    }
};

Engine::Engine(ModelSpec model, EngineOptions options) : impl_(std::make_unique<Impl>(std::move(model), std::move(options))) {}
Engine::~Engine() = default;

bool Engine::forward(std::span<const int32_t> tokens, bool budget_acts, bool last_only, float* logits,
                     const std::function<bool()>& interrupted, bool rows_alone, std::span<const int64_t> row_votes) {
    Impl& self = *impl_;
    const Clock::time_point begin = Clock::now();
    self.report = {};
    self.rows_alone = rows_alone;
    self.check(tokens, self.position, last_only);
    return self.reported(begin, [&] {
        if (!self.run(tokens, budget_acts, row_votes, interrupted)) return false;
        const int64_t n = static_cast<int64_t>(tokens.size());
        self.score(self.normed_hidden(n), n, last_only, logits);
        std::swap(self.hidden, self.kept_hidden);
        self.kept_rows = n;
        self.position += n;
        return true;
    });
}

bool Engine::mtp_forward(std::span<const int32_t> tokens_next, const float* hidden, bool budget_acts, bool last_only, float* logits,
                         const std::function<bool()>& interrupted, bool rows_alone) {
    Impl& self = *impl_;
    const Clock::time_point begin = Clock::now();
    self.report = {};
    self.rows_alone = rows_alone;
    self.check(tokens_next, self.block().position(), last_only);
    return self.reported(begin, [&] { return self.draft(tokens_next, hidden, budget_acts, last_only, logits, interrupted); });
}

void Engine::reroute(const RoutingOptions& routing, std::vector<int64_t> budgets) {
    check_budgets(impl_->model, budgets);
    impl_->options.routing = routing;
    impl_->options.budgets = std::move(budgets);
}

void Engine::rewind(int64_t positions) {
    if (positions < 0 || positions > impl_->position)
        throw Error("RewindError", "cannot drop more positions than there are", "rewind", "0 … " + std::to_string(impl_->position),
                    std::to_string(positions));
    impl_->position -= positions;
    if (impl_->mtp) impl_->mtp->rewind_to(std::min(impl_->mtp->position(), impl_->position));
}

void Engine::mtp_rewind(int64_t rows) {
    if (!impl_->mtp || rows < 0 || rows > mtp_position())
        throw Error("RewindError", "cannot drop more rows than there are", "mtp_rewind", "0 … " + std::to_string(mtp_position()),
                    std::to_string(rows));
    impl_->mtp->rewind_to(mtp_position() - rows);
}

int64_t Engine::position() const { return impl_->position; }
const std::vector<Selection>& Engine::selections() const { return impl_->selections; }
const StepReport& Engine::report() const { return impl_->report; }
std::span<const float> Engine::hidden() const {
    return {impl_->kept_hidden.data(), static_cast<size_t>(impl_->kept_rows * impl_->model.width)};
}
int64_t Engine::mtp_position() const { return impl_->mtp ? impl_->mtp->position() : 0; }
std::span<const float> Engine::mtp_hidden() const { return impl_->block().hidden(); }
const Selection& Engine::mtp_selection() const { return impl_->block().selection(); }
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
