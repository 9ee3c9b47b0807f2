// The feed-forward half of a layer.
//
// routed_TD = sum_E w_TE * expert_E(x_TD) in ascending expert id; y_TD = routed_TD + shared(x_TD).
// Each expert is taken once for all of its positions, while the store reads the next ones; whatever the order in which they
// are taken, sums go by ascending id.
#include "moe.h"

#include <algorithm>
#include <cstring>

#include "colibri/error.h"

namespace colibri {
namespace {

constexpr int64_t kMostOutOfOrder = 16;  // positions of a step whose experts may be taken in another order than they are summed in

}  // namespace

void run_mlp(Products& products, const MlpViews& mlp, Activations& x, FeedForwardScratch& s, float* y) {
    const int64_t n = x.n(), hidden = mlp.gate.rows;
    s.gate.reserve(n * hidden);
    s.up.reserve(n * hidden);
    products.multiply(mlp.gate, x, s.gate.data(), hidden);
    products.multiply(mlp.up, x, s.up.data(), hidden);
    products.pool().parallel_for(n, n * hidden * 16, [&](int64_t begin, int64_t end, int) {
        products.kernels().silu_mul(s.gate.data() + begin * hidden, s.up.data() + begin * hidden, (end - begin) * hidden,
                                    s.gate.data() + begin * hidden);
    });
    s.hidden_input.set(s.gate.data(), n, hidden, "MLP hidden state", x.positions());
    products.multiply(mlp.down, s.hidden_input, y, mlp.down.rows);
}

FeedForward::FeedForward(const ModelSpec& model, int64_t layer, int64_t moe_index, const std::vector<std::string>& files)
    : model_(model), moe_index_(moe_index), router_spec_(model.router) {
    const auto load = [&](const std::string& name, Resident form) {
        const std::string role = "layers." + std::to_string(layer) + "." + name;
        return Weights(role, model.tensors.at(role), form, files);
    };
    norm_ = load("mlp_norm", Resident::f32);
    const std::string mlp = sparse() ? "shared" : "mlp";
    if (!sparse() || model.shared_hidden) {
        gate_ = load(mlp + ".gate", Resident::rows16);
        up_ = load(mlp + ".up", Resident::rows16);
        down_ = load(mlp + ".down", Resident::rows16);
    }
    if (!sparse()) return;
    router_ = load("router.weight", Resident::f32);
    if (model.tensors.contains("layers." + std::to_string(layer) + ".router.bias")) {
        const Weights bias = load("router.bias", Resident::f32);
        router_spec_.bias.assign(bias.f32(), bias.f32() + model.experts);
    }
}

int64_t FeedForward::scratch_floats_per_position(const ModelSpec& m) {
    const int64_t hidden = std::max(m.dense_hidden, std::max(m.expert_hidden, m.shared_hidden));
    return 6 * m.width + 2 * hidden + 2 * m.experts + 2;
}

int64_t FeedForward::scratch_floats(const ModelSpec& m) { return kMostOutOfOrder * m.router.top_k * m.width; }

void FeedForward::step(MoEContext& context, FeedForwardScratch& s, const RoutingOptions& options, float* hidden, int64_t n,
                       Selection* selection, const Next* next) {
    const Kernels& kernels = context.products.kernels();
    const int64_t width = model_.width;
    s.normed.reserve(n * width);
    s.out.reserve(n * width);
    normalise(kernels, hidden, n, s.normed.data());
    s.input.set(s.normed.data(), n, width, "MLP input");
    const auto look_ahead = [&] {
        if (next) next->layer->look_ahead(context, s, next->options, hidden, n);
    };
    const MlpViews mlp{gate_.view(), up_.view(), down_.view()};  // dense, or shared experts
    if (!sparse()) {
        look_ahead();
        run_mlp(context.products, mlp, s.input, s, s.out.data());
        return kernels.axpy(1.0f, s.out.data(), n * width, hidden);
    }
    *selection = choose(context, s, options, s.normed.data(), n, s.router_logits);
    count_avoided(context, *selection);
    const bool in_order = set_order(context, s, *selection, n);
    // The disk works from here on; what needs none of its bytes is computed first.
    ExpertStore::Walk walk = context.store->walk(static_cast<int>(moe_index_), s.order);
    look_ahead();
    const PhaseClock::Scope timed(context.clock, Phase::experts);
    s.routed.reserve(n * width);
    s.shared.reserve(n * width);
    const bool shared = !gate_.empty();
    const auto run_shared = [&] { run_mlp(context.products, mlp, s.input, s, s.shared.data()); };
    if (shared && !context.traced) run_shared();
    run_experts(context, s, walk, *selection, n, in_order);
    if (shared && context.traced) run_shared();
    if (shared) kernels.axpy(1.0f, s.shared.data(), n * width, s.routed.data());
    kernels.axpy(1.0f, s.routed.data(), n * width, hidden);
}

void FeedForward::normalise(const Kernels& kernels, const float* hidden, int64_t n, float* out) const {
    const int64_t width = model_.width;
    for (int64_t p = 0; p < n; ++p) kernels.rms_norm(hidden + p * width, norm_.f32(), model_.rms_eps, width, out + p * width);
}

// The choice of `n` positions whose normed input is given; logits [n][experts] stay in `logits`.
Selection FeedForward::choose(MoEContext& context, FeedForwardScratch& s, const RoutingOptions& options, const float* normed,
                              int64_t n, Buffer<float>& logits) const {
    const int64_t experts = model_.experts, width = model_.width;
    logits.reserve(n * experts);
    context.products.pool().parallel_for(n * experts, n * experts * width * 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i)
            logits[i] = static_cast<float>(
                context.products.kernels().dot_f64(router_.f32() + (i % experts) * width, normed + (i / experts) * width, width));
    });
    s.resident.clear();
    if (looks_at_cache(options.policy))
        for (int32_t expert = 0; expert < experts; ++expert)
            if (context.store->resident(static_cast<int>(moe_index_), expert)) s.resident.push_back(expert);
    return select_experts({logits.data(), static_cast<size_t>(n * experts)}, n, experts, router_spec_, options, s.resident,
                          context.row_votes);
}

void FeedForward::count_avoided(MoEContext& context, const Selection& selection) const {
    for (const int32_t expert : selection.removed)
        if (!context.store->resident(static_cast<int>(moe_index_), expert))
            context.report.avoided_read_bytes_estimate +=
                static_cast<uint64_t>(context.store->expert_file_bytes(static_cast<int>(moe_index_)));
}

void FeedForward::look_ahead(MoEContext& context, FeedForwardScratch& s, const RoutingOptions& options, const float* hidden,
                             int64_t n) const {
    s.ahead_normed.reserve(n * model_.width);
    normalise(context.products.kernels(), hidden, n, s.ahead_normed.data());
    try {
        s.ahead = choose(context, s, options, s.ahead_normed.data(), n, s.ahead_logits).kept;
    } catch (const Error&) {
        return;  // advice only: what is no number here is reported by the layer itself, if it still is none there
    }
    s.ahead_moe_index = moe_index_;
    context.store->announce(static_cast<int>(moe_index_), s.ahead);
}

// The kept experts in the order in which products take them and reads begin: residents, then those that were announced, then
// the others. Out of ascending order every position's outputs must wait for their sum, so steps of many positions keep it.
// True where the order is ascending.
bool FeedForward::set_order(const MoEContext& context, FeedForwardScratch& s, const Selection& selection, int64_t n) const {
    s.order.assign(selection.kept.begin(), selection.kept.end());
    if (n > kMostOutOfOrder || context.traced) return true;
    const auto others = std::stable_partition(s.order.begin(), s.order.end(), [&](int32_t expert) {
        return context.store->resident(static_cast<int>(moe_index_), expert);
    });
    if (s.ahead_moe_index == moe_index_)
        std::stable_partition(others, s.order.end(),
                              [&](int32_t expert) { return std::find(s.ahead.begin(), s.ahead.end(), expert) != s.ahead.end(); });
    return std::is_sorted(s.order.begin(), s.order.end());
}

void FeedForward::run_experts(MoEContext& context, FeedForwardScratch& s, ExpertStore::Walk& walk, const Selection& selection,
                              int64_t n, bool in_order) {
    const int64_t width = model_.width, top_k = selection.top_k;
    Products& products = context.products;
    const auto add = [&](int64_t slot, const float* out) {
        products.kernels().axpy(selection.weights[slot], out, width, s.routed.data() + slot / top_k * width);
    };
    std::memset(s.routed.data(), 0, n * width * sizeof(float));
    if (!in_order) s.slots.reserve(n * top_k * width);

    const StoredExpert& shape = *context.shape;
    for (const int32_t expert : s.order) {
        s.rows.clear();
        s.chosen.clear();
        for (int64_t slot = 0; slot < n * top_k; ++slot)
            if (selection.ids[slot] == expert) {
                s.rows.push_back(static_cast<int32_t>(slot / top_k));
                s.chosen.push_back(slot);
            }
        context.clock.enter(Phase::disk_wait);
        const ExpertLease lease = walk.next();
        context.clock.enter(Phase::experts);

        const MlpViews mlp{view_of(shape.gate, lease.gate()), view_of(shape.up, lease.up()), view_of(shape.down, lease.down())};
        // One position alone needs no copy; its quantised form is shared by all of its experts.
        Activations* input = &s.input;
        if (n > 1) {
            s.gathered.gather(s.input, s.rows, products, mlp.gate.group == mlp.up.group ? mlp.gate.group : 0);
            input = &s.gathered;
        }
        run_mlp(products, mlp, *input, s, s.out.data());
        for (size_t i = 0; i < s.chosen.size(); ++i) {
            const float* out = s.out.data() + static_cast<int64_t>(i) * width;
            if (in_order)
                add(s.chosen[i], out);
            else
                std::memcpy(s.slots.data() + s.chosen[i] * width, out, width * sizeof(float));
        }
    }
    if (in_order) return;
    for (const int32_t expert : selection.kept)
        for (int64_t slot = 0; slot < n * top_k; ++slot)
            if (selection.ids[slot] == expert) add(slot, s.slots.data() + slot * width);
}

}  // namespace colibri
