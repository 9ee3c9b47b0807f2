"""`load`: one door to both implementations, from a container or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from colibri_jax.container.plan import target_format
from colibri_jax.container.reader import Container, is_container
from colibri_jax.container.source import SourceCheckpoint
from colibri_jax.errors import OptionError
from colibri_jax.quant import DEFAULT_GROUP_SIZE, Float32Array, QuantizedMatrix, quantize
from colibri_jax.routing_spec import RoutingOptions, Scope, check_scopes
from colibri_jax.tensors import TensorSpec, tensor_specs

if TYPE_CHECKING:
    from colibri_jax.engine.session import NativeModel
    from colibri_jax.reference.model import ReferenceModel

Backend = Literal["native", "reference"]
Precision = Literal["full", "w4a8", "w4a32"]


def load(
    path: str | Path,
    backend: Backend = "native",
    precision: Precision | None = None,
    *,
    routing: RoutingOptions | None = None,
    budget_scopes: Iterable[Scope] = ("decode",),
    context_positions: int | None = None,
    cache_experts: int | None = None,
    ram_bytes: int | None = None,
    cache_policy: Literal["step_lfu", "lru"] | None = None,
    threads: int | None = None,
    io_threads: int | None = None,
    io: Literal["direct", "buffered"] | None = None,
    reader: Literal["auto", "pread", "uring"] | None = None,
    pipe: bool | None = None,
    pilot: bool | None = None,
    pinned: tuple[tuple[int, ...], ...] | None = None,
    mtp: bool = False,
    isa: str = "",
    group_size: int | None = None,
    residency: Literal["all", "layer"] = "all",
) -> NativeModel | ReferenceModel:
    """Open a model.

    Args:
        path: a container, or (reference only) a Hugging Face checkpoint directory.
        backend: "native" executes from disk; "reference" computes in JAX with everything in memory.
        precision: "full" (reference; default for a Hugging Face directory), "w4a8" (default for a container) or "w4a32".
        routing: TOPK and TOPP act in every scope, the budget in `budget_scopes`.
        budget_scopes: any of "prefill", "decode", "verify".
        context_positions: positions of the KV cache.
        cache_experts, ram_bytes: size of the native expert cache, per MoE layer or by a bound on all memory; not both.
        cache_policy, threads, io_threads, io, reader, pipe, pilot, pinned, isa: how the native engine runs, see
            `engine.options.EngineOptions`; they change no bit of its output.
        mtp: load the MTP block, for drafts; the reference has it in any case unless `residency` is "layer".
        group_size: of an untagged int4 container whose byte counts fit several.
        residency: "layer" (reference) holds one layer at a time, without its experts, and reads everything as it is needed: slow, and
            for models that do not fit in memory.

    Returns:
        A `generate.protocol.LanguageModel`.

    Raises:
        OptionError: options contradict each other, the backend or the model.
        ContainerError: the directory is not a usable container or checkpoint, or its MTP block is no use and was asked for.
        MemoryBudgetError: the bound is too small.
    """
    scopes = check_scopes(budget_scopes)
    routing = routing or RoutingOptions()
    source = Path(path)
    native_only = {
        "cache_experts": cache_experts,
        "ram_bytes": ram_bytes,
        "cache_policy": cache_policy,
        "threads": threads,
        "io_threads": io_threads,
        "io": io,
        "reader": reader,
        "pipe": pipe,
        "pilot": pilot,
        "pinned": pinned,
        "isa": isa or None,
    }
    if residency not in ("all", "layer"):
        raise OptionError("unknown residency", where="residency", expected="all or layer", got=residency)
    if backend == "native":
        if residency != "all":
            raise OptionError("an option of the reference", where="residency", expected="backend='reference'", got="backend='native'")
        if not is_container(source):
            raise OptionError(
                "the native engine runs containers",
                where=str(source),
                expected="a converted directory (colibri-jax convert)",
                got="no out-*.safetensors",
            )
        return _load_native(
            Container.open(source, group_size=group_size),
            precision or "w4a8",
            routing,
            scopes,
            {"context_positions": context_positions, "mtp": mtp, **{k: v for k, v in native_only.items() if v is not None}},
        )
    if backend != "reference":
        raise OptionError("unknown backend", where="backend", expected="native or reference", got=backend)
    for name, value in native_only.items():
        if value is not None:
            raise OptionError("an option of the native engine", where=name, expected="backend='native'", got="backend='reference'")
    if mtp and residency != "all":
        raise OptionError("the MTP block needs the whole model in memory", where="mtp", expected="residency='all'", got=residency)
    return _load_reference(source, precision, routing, scopes, context_positions, group_size, residency, mtp)


def _load_native(
    container: Container, precision: Precision, routing: RoutingOptions, scopes: frozenset[Scope], options: Mapping[str, Any]
) -> NativeModel:
    from colibri_jax.engine.options import EngineOptions
    from colibri_jax.engine.session import NativeModel

    if precision == "full":
        raise OptionError("the native engine computes with quantised weights", where="precision", expected="w4a8 or w4a32", got=precision)
    return NativeModel(container, EngineOptions(precision=precision, **options), routing=routing, budget_scopes=scopes)


def _load_reference(
    source: Path,
    precision: Precision | None,
    routing: RoutingOptions,
    scopes: frozenset[Scope],
    context_positions: int | None,
    group_size: int | None,
    residency: Literal["all", "layer"],
    mtp: bool,
) -> ReferenceModel:
    from colibri_jax.reference.model import ReferenceModel

    params: Mapping[str, Float32Array | QuantizedMatrix]
    if is_container(source):
        container = Container.open(source, group_size=group_size)
        if mtp:
            container.require_mtp()
        config, params = container.runnable_config, _Lazy(container, list(container.entries))
        precision = precision or "w4a8"
    else:
        checkpoint = SourceCheckpoint.open(source)
        config, precision = checkpoint.config, precision or "full"
        if mtp and not config.n_mtp_layers:
            raise OptionError("the checkpoint has no MTP block", where=f"mtp, {source}", expected="one with a block", got="none")
        specs = {spec.role: spec for spec in tensor_specs(config)}
        params = _Lazy(checkpoint if precision == "full" else _Quantising(checkpoint, specs), list(specs))
    return ReferenceModel(
        config,
        params,
        precision=precision,
        routing=routing,
        budget_scopes=scopes,
        context_positions=context_positions,
        expert_residency="all" if residency == "all" else "kept",
        layer_residency="all" if residency == "all" else "one",
    )


class _Quantising:
    """A checkpoint read as if it had been converted."""

    def __init__(self, checkpoint: SourceCheckpoint, specs: dict[str, TensorSpec]) -> None:
        self._checkpoint, self._specs = checkpoint, specs

    def read(self, role: str) -> Float32Array | QuantizedMatrix:
        values, fmt = self._checkpoint.read(role), target_format(self._specs[role].storage, "row_major", DEFAULT_GROUP_SIZE)
        return values if fmt.bits == 32 else quantize(values, fmt)


class _Lazy(Mapping[str, Float32Array | QuantizedMatrix]):
    """Tensors by role, read when asked for, so that the reference holds each only in the form that it needs."""

    def __init__(self, source: Container | SourceCheckpoint | _Quantising, roles: list[str]) -> None:
        self._source, self._roles = source, dict.fromkeys(roles)

    def __getitem__(self, role: str) -> Float32Array | QuantizedMatrix:
        if role not in self:
            raise KeyError(role)
        return self._source.read(role)

    def __contains__(self, role: object) -> bool:
        return role in self._roles

    def __iter__(self) -> Iterator[str]:
        return iter(self._roles)

    def __len__(self) -> int:
        return len(self._roles)
