// The MTP block. DeepSeek-V3 (arXiv 2412.19437) §2.2, with the trunk's hidden state taken after its final norm.
//
// x_TD = eh_proj(concat(enorm(embed(token_{t+1})), hnorm(hidden_t))); y_TD = norm(layer(x_TD)); row t keeps rope position t.
#include "mtp.h"

#include <utility>

namespace colibri {

MtpBlock::MtpBlock(const ModelSpec& model, int64_t context, const std::vector<std::string>& files)
    : model_(model),
      attention_(Attention::make(model, model.layers, context, files)),
      feed_forward_(model, model.layers, model.moe_layers(), files) {
    const auto load = [&](const char* role, Resident form) { return Weights(role, model.tensors.at(role), form, files); };
    enorm_ = load("mtp.enorm", Resident::f32);
    hnorm_ = load("mtp.hnorm", Resident::f32);
    eh_proj_ = load("mtp.eh_proj", Resident::rows16);
    norm_ = load("mtp.norm", Resident::f32);
}

float* MtpBlock::step(MoEContext& context, const Shared& shared, const RoutingOptions& options,
                      std::span<const int32_t> tokens_next, const float* hidden) {
    Products& products = context.products;
    const Kernels& kernels = products.kernels();
    const int64_t n = static_cast<int64_t>(tokens_next.size()), width = model_.width;
    joined_.reserve(n * 2 * width);
    stream_.reserve(n * width);
    for (int64_t p = 0; p < n; ++p) {
        float* row = joined_.data() + p * 2 * width;
        shared.embed.row(kernels, tokens_next[static_cast<size_t>(p)], row);
        kernels.rms_norm(row, enorm_.f32(), model_.rms_eps, width, row);
        kernels.rms_norm(hidden + p * width, hnorm_.f32(), model_.rms_eps, width, row + width);
    }
    input_.set(joined_.data(), n, 2 * width, "MTP input");
    products.multiply(eh_proj_.view(), input_, stream_.data(), width);
    shared.attention.attended.clear();
    {
        const PhaseClock::Scope timed(context.clock, Phase::attention);
        attention_->step(products, shared.rope, shared.attention, stream_.data(), n, position_);
    }
    feed_forward_.step(context, shared.feed_forward, options, stream_.data(), n, &selection_, nullptr);
    for (int64_t p = 0; p < n; ++p) {
        float* row = stream_.data() + p * width;
        kernels.rms_norm(row, norm_.f32(), model_.rms_eps, width, row);
    }
    return stream_.data();
}

void MtpBlock::commit(int64_t rows) {
    std::swap(stream_, kept_);
    kept_rows_ = rows;
    position_ += rows;
}

}  // namespace colibri
