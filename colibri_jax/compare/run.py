"""Runs the four comparisons on a container: the tokens, the steps, and which model sees what."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from colibri_jax.compare.layers import PartByPart, walk_parts
from colibri_jax.compare.report import CompareReport, Greedy
from colibri_jax.compare.step import NativeStep, Recording, Walk
from colibri_jax.compare.whole import Follower, OwnChoices, WholeModel, top2_margin
from colibri_jax.config import ModelConfig
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import ContextOverflowError, OptionError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.load import load
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.routing_spec import RoutingOptions, Scope

Progress = Callable[[str, int, int], None]
"""Called with what is running, and tokens or parts of the model done and in all."""

Precision = Literal["w4a8", "w4a32"]

CACHE_EXPERTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What to compare on.

    Attributes:
        tokens: teacher-forced tokens; the prompt is continued greedily (by the native engine) up to that many.
        prefill: leading tokens that go through one prefill step; the rest are decode steps.
        verify_rows: where above 1, the rest goes through verify steps of that many rows instead.
        greedy: tokens that both generate from the prompt (its first `prefill` tokens); 0 leaves that out.
    """

    tokens: int = 128
    prefill: int = 64
    verify_rows: int = 1
    greedy: int = 32

    def __post_init__(self) -> None:
        for field, least in (("tokens", 1), ("prefill", 1), ("verify_rows", 1), ("greedy", 0)):
            if getattr(self, field) < least:
                raise OptionError("count too small", where=field, expected=f"{least} or more", got=getattr(self, field))


def compare(
    path: str | Path,
    prompt_ids: Sequence[int],
    *,
    routing: RoutingOptions | None = None,
    budget_scopes: Sequence[Scope] | frozenset[Scope] = ("decode",),
    options: CompareOptions | None = None,
    cache_experts: int | None = None,
    ram_bytes: int | None = None,
    group_size: int | None = None,
    residency: Literal["all", "layer"] = "all",
    layers: Collection[int] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> CompareReport:
    """Compare reference and native on one container.

    The native engine goes first, all steps, and is let go; the reference then takes all steps through one layer after the other.

    Args:
        path: a container.
        prompt_ids: 1 token or more; where there are more than `options.tokens`, the first of them are used.
        routing, budget_scopes: as for `load`.
        options: how many tokens, in which steps.
        cache_experts, ram_bytes: of the native engine, not both; 8 experts a layer if neither. They change no result.
        group_size: of an untagged container.
        residency: "all" holds the whole reference in memory, "layer" one of its layers at a time, with experts loaded as the step
            keeps them: for containers larger than memory. It changes no result. Greedy tokens, which cannot go layer by layer,
            then load every layer anew for every token.
        layers: do (i) and (ii) on these alone, and nothing else. A layer that shares another's choice of positions (DSA) brings that one
            along.
        progress: told how far it is.

    Raises:
        OptionError, ContainerError: as `load`.
    """
    options, routing = options or CompareOptions(), routing or RoutingOptions()
    common: dict[str, Any] = {"routing": routing, "budget_scopes": budget_scopes, "group_size": group_size}
    if cache_experts is None and ram_bytes is None:
        cache_experts = CACHE_EXPERTS

    def load_native(precision: Precision) -> NativeModel:
        native = load(path, precision=precision, cache_experts=cache_experts, ram_bytes=ram_bytes, **common)
        assert isinstance(native, NativeModel)
        return native

    def load_reference(precision: Precision) -> ReferenceModel:
        reference = load(path, backend="reference", precision=precision, residency=residency, **common)
        assert isinstance(reference, ReferenceModel)
        return reference

    def record(precision: Precision, tokens: Sequence[int] | None) -> tuple[list[NativeStep], ModelConfig, Sequence[int]]:
        native = load_native(precision)
        if tokens is None:
            _check_room(options, native.context_positions)
            tokens = _continued(native, prompt_ids, options.tokens)
        n, what = len(tokens), f"native, {precision}"
        recording = Recording(lambda: load_native(precision), np.asarray(tokens), _cuts(n, options))
        return recording.run(native, lambda done: progress(what, done, n)), native.config, tokens

    def walk(what: str, walks: Sequence[Walk], reference: ReferenceModel) -> None:
        # Every walk is taken to its next stop before the first goes on.
        for stage, _ in enumerate(zip(*walks, strict=True)):
            progress(what, stage + 1, reference.config.n_layers + 2)

    steps, config, tokens = record("w4a8", None)
    parts, shipped, floats, greedy = PartByPart(), WholeModel(), WholeModel(), None
    chosen = None if layers is None else _with_sources(config, layers)
    reference = load_reference("w4a8")
    own = OwnChoices(reference)
    walks = [[walk_parts(step, reference, parts, chosen)] + [own.walk(step, shipped)] * (chosen is None) for step in steps]
    walk("reference, w4a8", list(itertools.chain(*walks)), reference)
    if chosen is None:
        if options.greedy:
            greedy = _compare_greedy(load_native("w4a8"), reference, prompt_ids[: options.prefill], options.greedy, progress)
        del reference, own, walks, steps
        (steps, _, _), reference = record("w4a32", tokens), load_reference("w4a32")
        follower = Follower(reference)
        walk("reference, w4a32", [follower.walk(step, floats) for step in steps], reference)
    rows = f"steps of {options.verify_rows} rows, scope verify" if options.verify_rows > 1 else "decode steps"
    return CompareReport(
        model=str(path),
        routing=_describe(routing, budget_scopes),
        tokens=len(tokens),
        steps=f"{min(options.prefill, len(tokens))} in one prefill step, the rest in {rows}",
        layers=chosen,
        parts=parts,
        float_activations=floats if chosen is None else None,
        shipped=shipped if chosen is None else None,
        greedy=greedy,
    )


def _with_sources(config: ModelConfig, layers: Collection[int]) -> tuple[int, ...]:
    """Layers, ascending, and those whose choice of positions they share."""
    outside = sorted(set(layers) - set(range(config.n_layers)))
    if outside or not layers:
        got = f"layer {outside[0]}" if outside else "none"
        raise OptionError("no such layer", where="layers", expected=f"some of 0 to {config.n_layers - 1}", got=got)
    found = set(layers)
    for layer in layers:
        source = layer
        while config.indexer is not None and config.indexer.kinds[source] == "shared":
            source -= 1
        found.add(source)
    return tuple(sorted(found))


def _check_room(options: CompareOptions, positions: int) -> None:
    needed = max(options.tokens, options.prefill + options.greedy)
    if needed > positions:
        raise ContextOverflowError("more tokens than the context holds", where="compare", expected=f"at most {positions}", got=needed)


def _continued(native: NativeModel, prompt_ids: Sequence[int], n: int) -> list[int]:
    tokens = list(prompt_ids[:n])
    step = tokens
    while len(tokens) < n:
        scope: Scope = "prefill" if step is tokens else "decode"
        step = [int(native.forward(step, scope=scope, logits="last")[0].argmax())]
        tokens = tokens + step
    native.reset()
    return tokens


def _cuts(n_tokens: int, options: CompareOptions) -> list[tuple[int, Scope]]:
    """How many tokens each step takes, and its scope."""
    scope: Scope = "verify" if options.verify_rows > 1 else "decode"
    first = min(options.prefill, n_tokens)
    rest = [(min(options.verify_rows, n_tokens - begin), scope) for begin in range(first, n_tokens, options.verify_rows)]
    return [(first, "prefill"), *rest]


def _compare_greedy(native: LanguageModel, reference: LanguageModel, prompt_ids: Sequence[int], n: int, progress: Progress) -> Greedy:
    rows = []
    for model in (native, reference):
        model.reset()
        rows.append(model.forward(prompt_ids, scope="prefill", logits="last")[0])
    for i in range(n):
        native_W, reference_W = rows
        ours, theirs = int(reference_W.argmax()), int(native_W.argmax())
        if ours != theirs:
            difference = float(np.abs(native_W - reference_W).max())
            return Greedy(tokens=n, first_difference=i, margin=top2_margin(reference_W), difference=difference)
        progress("greedy", i + 1, n)
        if i + 1 < n:
            rows = [model.forward([ours], scope="decode", logits="last")[0] for model in (native, reference)]
    return Greedy(tokens=n, first_difference=None)


def _describe(routing: RoutingOptions, scopes: Collection[Scope]) -> str:
    parts = [f"budget {routing.budget or 'off'}"]
    if routing.budget:
        parts.append(f"{routing.policy}, {routing.denominator}, {routing.vote}, scope {' '.join(sorted(scopes))}")
    if routing.expert_topk:
        parts.append(f"TOPK {routing.expert_topk}")
    if routing.expert_topp:
        parts.append(f"TOPP {routing.expert_topp:g}")
    return ", ".join(parts)
