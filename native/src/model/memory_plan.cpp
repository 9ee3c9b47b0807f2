// What an engine takes of memory, from its description alone.
#include <algorithm>

#include "attention.h"
#include "check_spec.h"
#include "colibri/engine.h"
#include "moe.h"
#include "mtp.h"

namespace colibri {

MemoryPlan Engine::memory_plan(const ModelSpec& m, const EngineOptions& o) {
    check_spec(m, o);
    MemoryPlan plan;
    for (const auto& [role, stored] : m.tensors) plan.dense_bytes += Weights::memory_bytes(stored, resident_form(role));
    if (m.tied) plan.dense_bytes += Weights::memory_bytes(m.tensors.at("embed"), Resident::rows16);
    for (int64_t layer = 0; layer < m.layers + m.mtp; ++layer) {
        plan.kv_cache_bytes += o.context * m.attention.cache_width() * 4;
        if (m.indexer.chooses(layer)) plan.kv_cache_bytes += o.context * m.indexer.dim * 4;
    }
    const bool has_experts = m.store_layers() > 0;
    plan.store_bytes = has_experts ? ExpertStore::memory_bytes(o.store) : 0;
    // Every float of a step may also stand quantised beside itself: one byte each, and two words per group of 16 or more.
    const int64_t floats = 2 * m.width + Attention::scratch_floats_per_position(m) + FeedForward::scratch_floats_per_position(m) +
                           (m.mtp ? MtpBlock::scratch_floats_per_position(m) : 0);
    // Ids and weights of every selection, here and in Python.
    plan.step_bytes_per_position = floats * 4 + floats * (16 + 8) / 16 + 2 * m.store_layers() * m.router.top_k * 8;
    // With float32 activations every thread dequantises one row block at a time.
    int64_t widest = has_experts ? std::max(m.width, m.expert_hidden) : m.width;
    for (const auto& [role, stored] : m.tensors)
        if (resident_form(role) == Resident::rows16) widest = std::max(widest, stored.cols);
    plan.fixed_bytes =
        Rope::memory_bytes(m.attention.rope, o.context) + o.threads * Attention::scratch_floats_per_thread(m, o.context) * 4 +
        (has_experts ? FeedForward::scratch_floats(m) * 4 : 0) + (o.quantised_activations ? 0 : o.threads * kRowBlock * widest * 4);
    return plan;
}

}  // namespace colibri
