"""From a container and load options to the dictionaries that the native engine is built from, and the memory plan."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from colibri_jax import _native
from colibri_jax.config import INDEXER_NORM_EPS, LATENT_NORM_EPS, AttentionConfig, MLAConfig, ModelConfig, RopeConfig
from colibri_jax.container.reader import Container, TensorEntry
from colibri_jax.engine.routing import option_fields
from colibri_jax.errors import MemoryBudgetError, OptionError
from colibri_jax.routing_spec import SCOPES, RoutingOptions, whole_number
from colibri_jax.tensors import expert_roles, tensor_specs

# A bound that leaves no room for a step of this many positions is refused; longer steps than it has room for are errors.
LEAST_STEP_POSITIONS = 64
# Steps of this many positions are made room for before the cache is: a usual chunk of a prompt.
WANTED_STEP_POSITIONS = 512
MOST_THREADS = 256
# Share of the memory that is free at load which an engine without a stated bound takes.
DEFAULT_MEMORY_SHARE = 0.7


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to run a container.

    Attributes:
        precision: "w4a8" quantises activations (as shipped); "w4a32" keeps them float32 (for comparison, slow).
        context_positions: positions of the KV cache; None takes the model's maximum, at most 4096.
        cache_experts: experts kept in memory per MoE layer; excludes `ram_bytes`.
        ram_bytes: bound on everything the engine allocates; the cache takes what is left. Where less is free at load, that is the
            bound. With neither, 70 % of what is free.
        cache_policy: which expert goes first where a layer's cache is full. "step_lfu": not those of the newest step, then the one
            with the smallest running mean of use over the layer's steps (a use counts half after 22), then the least recent; one that
            would go first itself does not enter. "lru": the least recent.
        threads: compute threads; None takes all processors of this process.
        io_threads: reads in flight.
        io: "direct" bypasses the page cache where the file system allows it, "buffered" goes through it.
        reader: "pread" is a pool of threads, "uring" one thread and the kernel's io_uring, an error where the kernel refuses
            that; "auto" takes the pool.
        pipe: the reads of a layer run ahead of its products; False begins each when its expert's turn has come.
        pilot: while a layer works, the next one's likely experts (its router on this layer's residual stream) are read behind this
            layer's own. Takes memory for as many experts as a position chooses.
        mtp: load the MTP block, for drafts. It has a KV cache of its own and as many cached experts as a layer of the trunk.
        pinned: of every MoE layer of the trunk, experts that stay in memory from their first use on, outside `cache_experts`; () pins none.
        isa: instruction set of the kernels; "" takes the best of this processor.

    Raises:
        OptionError: a field is outside its domain, or both sizes are given.
    """

    precision: Literal["w4a8", "w4a32"] = "w4a8"
    context_positions: int | None = None
    cache_experts: int | None = None
    ram_bytes: int | None = None
    cache_policy: Literal["step_lfu", "lru"] = "step_lfu"
    threads: int | None = None
    io_threads: int = 2
    io: Literal["direct", "buffered"] = "direct"
    reader: Literal["auto", "pread", "uring"] = "auto"
    pipe: bool = True
    pilot: bool = False
    mtp: bool = False
    pinned: tuple[tuple[int, ...], ...] = ()
    isa: str = ""

    def __post_init__(self) -> None:
        if self.precision not in ("w4a8", "w4a32"):
            raise OptionError("unknown precision of the native engine", where="precision", expected="w4a8 or w4a32", got=self.precision)
        if self.cache_experts is not None and self.ram_bytes is not None:
            raise OptionError(
                "two sizes for one cache",
                where="cache_experts, ram_bytes",
                expected="one of them",
                got=(self.cache_experts, self.ram_bytes),
            )
        for field in ("context_positions", "cache_experts", "ram_bytes", "threads", "io_threads"):
            if getattr(self, field) is None:
                continue
            value = whole_number(getattr(self, field), field)
            object.__setattr__(self, field, value)
            if value < 1:
                raise OptionError("not positive", where=field, expected="1 or more", got=value)
        for field in ("threads", "io_threads"):
            if (getattr(self, field) or 1) > MOST_THREADS:
                raise OptionError("too many threads", where=field, expected=f"1 to {MOST_THREADS}", got=getattr(self, field))
        if self.io not in ("direct", "buffered"):
            raise OptionError("unknown way of reading", where="io", expected="direct or buffered", got=self.io)
        if self.reader not in ("auto", "pread", "uring"):
            raise OptionError("unknown reader", where="reader", expected="auto, pread or uring", got=self.reader)
        if self.cache_policy not in ("step_lfu", "lru"):
            raise OptionError("unknown cache policy", where="cache_policy", expected="step_lfu or lru", got=self.cache_policy)

    def resolved_threads(self) -> int:
        """Compute threads after defaults."""
        return self.threads or min(len(os.sched_getaffinity(0)), MOST_THREADS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """Everything the native engine is built from, and the sizes that came out."""

    model: dict[str, Any]
    options: dict[str, Any]
    cache_experts: int
    dense_bytes: int
    kv_cache_bytes: int
    ram_bytes: int


def plan_engine(container: Container, options: EngineOptions, routing: RoutingOptions, *, free_bytes: int | None = None) -> EnginePlan:
    """Describe the engine for a container and fit its cache into the memory bound.

    Args:
        free_bytes: what to take for free memory, for a plan of another machine; by default what is free here.

    Raises:
        MemoryBudgetError: the bound cannot hold dense weights, KV cache, working memory and one slot per MoE layer.
        OptionError: options and model do not fit each other.
        UnknownFormatError: the MTP block that is asked for is of a kind that drafts in vain.
    """
    if options.mtp:
        container.require_mtp()
    config = container.runnable_config
    files = sorted({entry.path for entry in container.entries.values()})
    index = {path: number for number, path in enumerate(files)}
    roles = _dense_roles(config, mtp=options.mtp)
    model = {**_model_dict(config, {role: _matrix(container.entries[role], index) for role in roles}), "mtp": options.mtp}
    experts = [
        [tuple(_matrix(container.entries[role], index) for role in expert_roles(layer, e)) for e in range(config.moe.n_experts)]
        for layer in (*config.moe_layers, *([config.n_layers] if options.mtp else []))
    ]
    described = _options_dict(config, options, routing, [str(path) for path in files], experts)
    return _fit(config, options, model, described, free_bytes)


def _fit(
    config: ModelConfig, options: EngineOptions, model: dict[str, Any], described: dict[str, Any], free_bytes: int | None
) -> EnginePlan:
    def plan(cache_experts: int) -> dict[str, int]:
        sizes: dict[str, int] = _native.memory_plan(model, {**described, "cache_experts": cache_experts})
        return sizes

    def total(sizes: dict[str, int]) -> int:
        return sizes["dense_bytes"] + sizes["kv_cache_bytes"] + sizes["store_bytes"] + sizes["fixed_bytes"]

    def step(positions: int) -> int:
        rows: int = min(positions, described["context"])
        return rows * one["step_bytes_per_position"] + 4 * config.vocab_size

    most = config.moe.n_experts if described["experts"] else 1
    one = plan(1)
    if options.cache_experts is not None:
        cap, ram_bytes = min(options.cache_experts, most), 0
    else:
        free = free_memory_bytes() if free_bytes is None else free_bytes
        ram_bytes = min(options.ram_bytes, free) if options.ram_bytes else int(DEFAULT_MEMORY_SHARE * free)
        least_step = step(LEAST_STEP_POSITIONS)
        needed = total(one) + least_step
        if needed > ram_bytes:
            raise MemoryBudgetError(
                "the memory bound is too small",
                where="ram_bytes",
                expected=f">= {needed} (dense weights {one['dense_bytes']}, KV cache {one['kv_cache_bytes']}, one expert slot per "
                f"layer and staging {one['store_bytes']}, working memory {one['fixed_bytes'] + least_step})",
                got=ram_bytes,
            )
        per_slot = total(plan(2)) - total(one)
        room = max(ram_bytes - total(one) - step(WANTED_STEP_POSITIONS), 0)
        cap = min(most, 1 + room // per_slot) if per_slot else most
    sizes = plan(cap)
    return EnginePlan(
        model=model,
        options={**described, "cache_experts": cap, "step_bytes": ram_bytes - total(sizes) if options.ram_bytes else 0},
        cache_experts=cap,
        dense_bytes=sizes["dense_bytes"],
        kv_cache_bytes=sizes["kv_cache_bytes"],
        ram_bytes=ram_bytes,
    )


def free_memory_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise MemoryBudgetError(
        "the kernel does not say how much memory is free", where="/proc/meminfo", expected="MemAvailable", got="nothing"
    )


def _dense_roles(config: ModelConfig, *, mtp: bool) -> list[str]:
    loaded = config if mtp else dataclasses.replace(config, n_mtp_layers=0)
    return [spec.role for spec in tensor_specs(loaded) if ".experts." not in spec.role]


def _matrix(entry: TensorEntry, index: dict[Any, int]) -> tuple[Any, ...]:
    rows, cols = entry.shape if len(entry.shape) == 2 else (1, entry.shape[0])
    scales = entry.scales
    return (
        rows,
        cols,
        entry.format.bits,
        entry.format.group_size,
        entry.format.layout == "rows16",
        entry.format.scale_dtype.itemsize,
        (index[entry.path], entry.offset, entry.nbytes, entry.name),
        None if scales is None else (index[scales.path], scales.offset, scales.nbytes, scales.name),
    )


def _model_dict(config: ModelConfig, tensors: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    indexer, router = config.indexer, config.moe.router
    return {
        "vocab": config.vocab_size,
        "width": config.hidden_size,
        "layers": config.n_layers,
        "dense_hidden": config.dense_hidden,
        "sparse": list(config.sparse),
        "rms_eps": config.rms_eps,
        "attention": _attention_dict(config.attention),
        "indexer": None
        if indexer is None
        else {
            "heads": indexer.n_heads,
            "dim": indexer.head_dim,
            "topk": indexer.topk,
            "eps": INDEXER_NORM_EPS,
            "full": [kind == "full" for kind in indexer.kinds],
        },
        "experts": config.moe.n_experts,
        "expert_hidden": config.moe.expert_hidden,
        "shared_hidden": config.moe.shared_hidden,
        "router": {
            "score": router.score,
            "top_k": router.top_k,
            "n_group": router.n_group,
            "topk_group": router.topk_group,
            "norm_topk_prob": router.norm_topk_prob,
            "routed_scaling_factor": router.routed_scaling_factor,
        },
        "tied": config.tie_embeddings,
        "tensors": tensors,
    }


def _attention_dict(attention: AttentionConfig) -> dict[str, Any]:
    common = {"heads": attention.n_heads, "scale": attention.softmax_scale, "rope": _rope_dict(attention.rope)}
    if isinstance(attention, MLAConfig):
        return {
            **common,
            "kind": "mla",
            "q_rank": attention.q_lora_rank,
            "kv_rank": attention.kv_lora_rank,
            "nope": attention.nope_dim,
            "value": attention.value_dim,
            "latent_eps": LATENT_NORM_EPS,
        }
    return {
        **common,
        "kind": "gqa",
        "kv_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "qkv_bias": attention.qkv_bias,
        "qk_norm": attention.qk_norm,
        "clip": attention.clip or 0.0,
    }


def _rope_dict(rope: RopeConfig) -> dict[str, Any]:
    yarn = rope.yarn
    return {
        "dim": rope.dim,
        "theta": rope.theta,
        "interleaved": rope.layout == "interleaved",
        "attention_factor": rope.attention_factor,
        "yarn": None
        if yarn is None
        else {
            "factor": yarn.factor,
            "original_positions": yarn.original_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "truncate": yarn.truncate,
        },
    }


def _options_dict(
    config: ModelConfig, options: EngineOptions, routing: RoutingOptions, files: list[str], experts: list[list[tuple[Any, ...]]]
) -> dict[str, Any]:
    return {
        "files": files,
        "experts": experts,
        "cache_policy": options.cache_policy,
        "io_threads": options.io_threads,
        "direct": options.io == "direct",
        "reader": options.reader,
        "pipe": options.pipe,
        "pinned": [list(experts) for experts in (*options.pinned, *([()] if options.mtp and options.pinned else []))],
        "prefetch_experts": config.moe.router.top_k if options.pilot and config.moe_layers else 0,
        "context": config.resolve_context(options.context_positions),
        "threads": options.resolved_threads(),
        "isa": options.isa,
        "quantised_activations": options.precision == "w4a8",
        "step_bytes": 0,
        "routing": routing_dict(config, routing, mtp=options.mtp),
    }


def routing_dict(config: ModelConfig, routing: RoutingOptions, *, mtp: bool) -> dict[str, Any]:
    """Routing options as the extension takes them, with one budget per layer of the store."""
    layers = [routing.for_layer(i) for i in range(len(config.moe_layers))] + ([routing.of_drafts(SCOPES)] if mtp else [])
    return {
        **option_fields(routing, config.moe.router.top_k, config.moe.n_experts),
        "budgets": [min(options.scalar_budget, config.moe.n_experts) for options in layers],
    }
