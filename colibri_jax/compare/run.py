"""Runs the four comparisons on a container: the tokens, the steps, and which model sees what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from colibri_jax.compare.layers import PartByPart, compare_parts
from colibri_jax.compare.report import CompareReport, Greedy
from colibri_jax.compare.step import NativeStep
from colibri_jax.compare.whole import Follower, WholeModel, compare_step, top2_margin
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import ContextOverflowError, OptionError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.load import load
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.routing_spec import RoutingOptions, Scope

Progress = Callable[[str, int, int], None]
"""Called with what is running, tokens done, tokens in all."""


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
    cache_experts: int = 8,
    group_size: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> CompareReport:
    """Compare reference and native on one container.

    Args:
        path: a container.
        prompt_ids: 1 token or more; where there are more than `options.tokens`, the first of them are used.
        routing, budget_scopes: as for `load`.
        options: how many tokens, in which steps.
        cache_experts: of the native engine; it changes no result.
        group_size: of an untagged container.
        progress: told how far it is.

    Raises:
        OptionError, ContainerError: as `load`.
    """
    options, routing = options or CompareOptions(), routing or RoutingOptions()

    def models(precision: Literal["w4a8", "w4a32"]) -> tuple[NativeModel, ReferenceModel]:
        common = {"precision": precision, "routing": routing, "budget_scopes": budget_scopes, "group_size": group_size}
        native = load(path, cache_experts=cache_experts, **common)  # type: ignore[arg-type]  # one set of options for both backends
        reference = load(path, backend="reference", **common)  # type: ignore[arg-type]
        assert isinstance(native, NativeModel)
        assert isinstance(reference, ReferenceModel)
        native.set_trace(True)
        return native, reference

    native, reference = models("w4a8")
    _check_room(options, native.context_positions)
    tokens = np.asarray(_continued(native, prompt_ids, options.tokens))
    parts, shipped, floats = PartByPart(), WholeModel(), WholeModel()
    for step in _steps(native, tokens, options):
        compare_parts(step, reference, parts)
        compare_step(step, reference, reference.forward(step.tokens, scope=step.scope), shipped)
        progress("as shipped", native.position, len(tokens))
    greedy = _compare_greedy(native, reference, prompt_ids[: options.prefill], options.greedy, progress) if options.greedy else None
    del native, reference
    native, reference = models("w4a32")
    follower = Follower(reference)
    for step in _steps(native, tokens, options):
        follower.step(step, floats)
        progress("float32 activations", native.position, len(tokens))
    rows = f"steps of {options.verify_rows} rows, scope verify" if options.verify_rows > 1 else "decode steps"
    return CompareReport(
        model=str(path),
        routing=_describe(routing, budget_scopes),
        tokens=len(tokens),
        steps=f"{min(options.prefill, len(tokens))} in one prefill step, the rest in {rows}",
        parts=parts,
        float_activations=floats,
        shipped=shipped,
        greedy=greedy,
    )


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


def _steps(native: NativeModel, tokens: npt.NDArray[np.int64], options: CompareOptions) -> Iterator[NativeStep]:
    """Let the native engine do one step after the other."""
    begin = 0
    while begin < len(tokens):
        scope: Scope = "prefill" if begin == 0 else "verify" if options.verify_rows > 1 else "decode"
        some = tokens[begin : begin + (options.verify_rows if begin else options.prefill)]
        yield NativeStep(native, some, scope, native.forward(some, scope=scope))
        begin += len(some)


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
