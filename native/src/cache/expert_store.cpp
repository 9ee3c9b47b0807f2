// The store: construction, leases, and the rules by which a slot changes hands.
#include "colibri/expert_store.h"

#include <string>
#include <utility>

#include "store_core.h"

namespace colibri {
namespace {

void check_extents_inside(const StoreOptions& options, const FileSet& files) {
    for (const auto& layer : options.experts)
        for (const StoredExpert& expert : layer)
            for (const Extent* extent : extents_of(expert)) {
                if (!extent->nbytes) continue;
                const uint64_t size = files.size(extent->file);
                if (extent->nbytes > size || extent->offset > size - extent->nbytes)
                    throw Error("TruncatedFileError", "file shorter than its expert tensors",
                                files.path(extent->file) + ", " + extent->tensor + ", offset " + std::to_string(extent->offset),
                                std::to_string(extent->offset) + " + " + std::to_string(extent->nbytes) + " bytes",
                                std::to_string(size) + " bytes");
            }
}

}  // namespace

StoreCore::StoreCore(StoreOptions given)
    : options(std::move(given)),
      geometry(geometry_of(options)),
      hooks(options.hooks ? options.hooks : std::make_shared<ReadHooks>()),
      files(options.files, options.direct, *hooks),
      arena(geometry.total_bytes()),
      slots(static_cast<size_t>(geometry.slots)) {
    check_extents_inside(options, files);
    uint64_t at = 0;
    free_slots.reserve(slots.size());
    for (Slot& slot : slots) {
        slot.memory = arena.at(at);
        at += geometry.slot_bytes;
    }
    // Taken from the back: the first slots are used first.
    for (size_t i = slots.size(); i-- > 0;) free_slots.push_back(&slots[i]);
    for (int64_t i = 0; i < geometry.staging_buffers; ++i, at += geometry.staging_bytes) free_staging.push_back(arena.at(at));
    for (size_t layer = 0; layer < options.experts.size(); ++layer)
        layers.emplace_back(options.cache_policy, geometry.slots_per_layer[layer], options.experts[layer].size(),
                            options.pinned.empty() ? std::vector<int32_t>{} : options.pinned[layer]);
    reader = make_reader(options.reader, files, options.io_threads, *hooks);
}

void StoreCore::check_expert(int layer, int expert) const {
    const auto reject = [](const char* what, int got, size_t count) {
        throw Error("EngineError", "the store was asked for what it does not have", what, "0 … " + std::to_string(count - 1),
                    std::to_string(got));
    };
    if (layer < 0 || static_cast<size_t>(layer) >= options.experts.size()) reject("layer", layer, options.experts.size());
    const size_t experts = options.experts[static_cast<size_t>(layer)].size();
    if (expert < 0 || static_cast<size_t>(expert) >= experts) reject("expert", expert, experts);
}

void StoreCore::free_slot(Slot* slot) {
    slot->layer = slot->expert = -1;
    free_slots.push_back(slot);
}

bool StoreCore::cache(Slot* slot) {
    const LayerCache::Insertion inserted = layers[static_cast<size_t>(slot->layer)].insert(slot);
    if (inserted.evicted) free_slot(inserted.evicted);
    return inserted.done;
}

void StoreCore::release(Slot* slot) {
    const std::lock_guard lock(mutex);
    if (--slot->leases) return;
    // An expert that found every slot of its layer leased when it was handed out gets a second chance now.
    if (!slot->cached && !cache(slot)) free_slot(slot);
    start_reads();
}

ExpertLease::ExpertLease(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ExpertLease::ExpertLease(ExpertLease&&) noexcept = default;
ExpertLease& ExpertLease::operator=(ExpertLease&& other) noexcept {
    if (this != &other) {
        if (impl_) impl_->core->release(impl_->slot);
        impl_ = std::move(other.impl_);
    }
    return *this;
}
ExpertLease::~ExpertLease() {
    if (impl_) impl_->core->release(impl_->slot);
}
int ExpertLease::expert() const { return impl_->slot->expert; }
const uint8_t* ExpertLease::gate() const { return impl_->slot->memory + impl_->slot->parts[0]; }
const uint8_t* ExpertLease::up() const { return impl_->slot->memory + impl_->slot->parts[1]; }
const uint8_t* ExpertLease::down() const { return impl_->slot->memory + impl_->slot->parts[2]; }

ExpertStore::ExpertStore(StoreOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
ExpertStore::~ExpertStore() = default;

bool ExpertStore::resident(int layer, int expert) const {
    const StoreCore& core = impl_->core;
    core.check_expert(layer, expert);
    const std::lock_guard lock(core.mutex);
    return core.layers[static_cast<size_t>(layer)].find(expert) != nullptr;
}

std::vector<int> ExpertStore::by_rank(int layer) const {
    const StoreCore& core = impl_->core;
    core.check_expert(layer, 0);
    const std::lock_guard lock(core.mutex);
    std::vector<int> experts;
    for (const Slot* slot : core.layers[static_cast<size_t>(layer)].by_rank()) experts.push_back(slot->expert);
    return experts;
}

int64_t ExpertStore::free_slots() const {
    const std::lock_guard lock(impl_->core.mutex);
    return static_cast<int64_t>(impl_->core.free_slots.size());
}

StoreCounters ExpertStore::counters() const {
    const std::lock_guard lock(impl_->core.mutex);
    return impl_->core.counters;
}

double ExpertStore::wait_seconds() const { return counters().wait_seconds; }
std::string ExpertStore::reader() const { return impl_->core.files.description() + ", " + impl_->core.reader->name(); }
int64_t ExpertStore::slot_bytes() const { return static_cast<int64_t>(impl_->core.geometry.slot_bytes); }
int64_t ExpertStore::expert_file_bytes(int layer) const {
    impl_->core.check_expert(layer, 0);
    return static_cast<int64_t>(file_bytes(impl_->core.options.experts[static_cast<size_t>(layer)][0]));
}
int64_t ExpertStore::memory_bytes(const StoreOptions& options) { return static_cast<int64_t>(geometry_of(options).total_bytes()); }

}  // namespace colibri
