// The feed-forward half of a layer.
//
// routed_TD = sum_E w_TE * expert_E(x_TD) in ascending expert id; y_TD = routed_TD + shared(x_TD).
// Experts are taken in ascending id, each once for all of its positions, while the store reads the next ones.
#include "moe.h"

#include <algorithm>
#include <cstring>

namespace colibri {

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
    return 4 * m.width + 2 * hidden + m.experts + 2;
}

void FeedForward::step(MoEContext& context, FeedForwardScratch& s, const RoutingOptions& options, float* hidden, int64_t n,
                       Selection* selection) {
    const Kernels& kernels = context.products.kernels();
    const int64_t width = model_.width;
    s.normed.reserve(n * width);
    s.out.reserve(n * width);
    for (int64_t p = 0; p < n; ++p)
        kernels.rms_norm(hidden + p * width, norm_.f32(), model_.rms_eps, width, s.normed.data() + p * width);
    s.input.set(s.normed.data(), n, width, "MLP input");
    const MlpViews dense{gate_.view(), up_.view(), down_.view()};
    if (!sparse()) {
        run_mlp(context.products, dense, s.input, s, s.out.data());
    } else {
        route(context, s, options, n, *selection);
        const PhaseClock::Scope timed(context.clock, Phase::experts);
        run_experts(context, s, *selection, n);
        if (gate_.empty()) {
            std::memcpy(s.out.data(), s.routed.data(), n * width * sizeof(float));
        } else {
            run_mlp(context.products, dense, s.input, s, s.out.data());
            kernels.axpy(1.0f, s.routed.data(), n * width, s.out.data());
        }
    }
    kernels.axpy(1.0f, s.out.data(), n * width, hidden);
}

void FeedForward::route(MoEContext& context, FeedForwardScratch& s, const RoutingOptions& options, int64_t n,
                        Selection& selection) {
    const int64_t experts = model_.experts, width = model_.width;
    s.router_logits.reserve(n * experts);
    context.products.pool().parallel_for(n * experts, n * experts * width * 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i)
            s.router_logits[i] = static_cast<float>(context.products.kernels().dot_f64(
                router_.f32() + (i % experts) * width, s.normed.data() + (i / experts) * width, width));
    });
    s.resident.clear();
    if (options.policy == Policy::resident)
        for (int32_t expert = 0; expert < experts; ++expert)
            if (context.store->resident(static_cast<int>(moe_index_), expert)) s.resident.push_back(expert);
    selection =
        select_experts({s.router_logits.data(), static_cast<size_t>(n * experts)}, n, experts, router_spec_, options, s.resident);
    for (const int32_t expert : selection.removed)
        if (!context.store->resident(static_cast<int>(moe_index_), expert))
            context.report.avoided_read_bytes_estimate += static_cast<uint64_t>(context.store->expert_file_bytes());
}

void FeedForward::run_experts(MoEContext& context, FeedForwardScratch& s, const Selection& selection, int64_t n) {
    const int64_t width = model_.width, top_k = selection.top_k;
    Products& products = context.products;
    s.routed.reserve(n * width);
    std::memset(s.routed.data(), 0, n * width * sizeof(float));

    ExpertStore::Walk walk = context.store->walk(static_cast<int>(moe_index_), selection.kept);
    const StoredExpert& shape = *context.shape;
    for (const int32_t expert : selection.kept) {
        s.rows.clear();
        s.row_weights.clear();
        for (int64_t slot = 0; slot < n * top_k; ++slot)
            if (selection.ids[slot] == expert) {
                s.rows.push_back(static_cast<int32_t>(slot / top_k));
                s.row_weights.push_back(selection.weights[slot]);
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
        for (size_t i = 0; i < s.rows.size(); ++i)
            products.kernels().axpy(s.row_weights[i], s.out.data() + i * width, width, s.routed.data() + s.rows[i] * width);
    }
}

}  // namespace colibri
