"""Decoding, one token at a time: cold against the disk, warm against memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colibri_jax.bench.kernels import DEFAULT_BYTES, check_read, random_memory
from colibri_jax.bench.model import COLD_CACHE, ExpertBlocks, StepCost, dense_bytes_touched, open_model, random_tokens, run
from colibri_jax.bench.report import GB, BenchError, Measured, Progress, Row, Table, budget_name, ratios
from colibri_jax.container.reader import Container
from colibri_jax.engine.passes import read_pass
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import OptionError
from colibri_jax.routing_spec import RoutingOptions

PROMPT = 14
MOST_WARMING_STEPS = 60
WARMING_POSITIONS = 256
IO_DEPTH = 2


def bench_cold_decode(
    path: Path,
    *,
    threads: int,
    tokens: int = 6,
    repeats: int = 7,
    depth: int = IO_DEPTH,
    budget: int | tuple[int, ...] = 0,
    progress: Progress = lambda what: None,
    **engine: Any,
) -> Table:
    """Decode with a cache of two experts per layer and O_DIRECT, in turn with plain reads of as many experts.

    Args:
        tokens: decoded in one measurement.
        depth: reads in flight, of both.
        budget: the same tokens are decoded a second time under this expert budget, in turn with the first; 0 is off.
        engine: further arguments of `colibri_jax.load`.

    Raises:
        BenchError: logits depend on cache or threads.
    """
    container = Container.open(path)
    options = {"threads": threads, "io": "direct", "io_threads": depth, **engine}
    cold = open_model(path, cache_experts=COLD_CACHE, **options)
    _check_same(path, cold)
    blocks = ExpertBlocks(container, seed=2)
    top_k = container.config.moe.router.top_k
    # Room for one token's experts, so that the same token again is all hits: the computing alone.
    roomy = open_model(path, cache_experts=2 * top_k, **options)
    cut = open_model(path, cache_experts=COLD_CACHE, routing=RoutingOptions(budget=budget), **options) if budget else None
    for model in (cold, roomy, cut):
        if model is not None:
            run(model, random_tokens(model, PROMPT, 3), "prefill")
    costs: list[StepCost] = []
    raw: list[float] = []
    computing: list[float] = []
    cut_costs: list[StepCost] = []
    for repeat in range(repeats):
        progress(f"cold decode, {repeat + 1} of {repeats}")
        chosen = random_tokens(cold, tokens, 10 + repeat)
        raw.append(blocks.read(tokens * top_k * len(container.config.moe_layers), depth=depth))
        costs.append(run(cold, chosen, "decode"))
        if cut is not None:
            cut_costs.append(run(cut, chosen, "decode"))
        computing.append(_computing_seconds(roomy, chosen))
    rates = [cost.useful_bytes / cost.wall_seconds for cost in costs]
    alone = [max(cost.bytes_read / rate, seconds) for cost, rate, seconds in zip(costs, raw, computing, strict=True)]
    walls = [cost.wall_seconds for cost in costs]
    figures: dict[str, Any] = {
        "s per token": Measured(tuple(wall / tokens for wall in walls), "s"),
        "useful": Measured(tuple(rate / GB for rate in rates), "GB/s"),
        "raw O_DIRECT": Measured(tuple(rate / GB for rate in raw), "GB/s"),
        "share of raw": ratios(rates, raw),
        "wall / max(disk, computing)": ratios(walls, alone),
        "computing alone": Measured(tuple(seconds / tokens for seconds in computing), "s"),
        "misses": Measured(tuple(float(cost.misses) for cost in costs)),
        **_phases(costs, tokens),
    }
    if cut is not None:
        name = f"budget {budget_name(budget)}"
        figures |= {
            f"{name}: times as fast": ratios(walls, [cost.wall_seconds for cost in cut_costs]),
            f"{name}: share of bytes read": ratios([cost.bytes_read for cost in cut_costs], [cost.bytes_read for cost in costs]),
            f"{name}: mass kept": Measured(tuple(cost.stats.mass_kept for cost in cut_costs)),
        }
    if any(cost.stats.foreseeable_experts for cost in costs):
        figures["foreseen"] = Measured(tuple(cost.stats.prefetch_recall for cost in costs))
        figures["wasted"] = Measured(tuple(cost.stats.prefetch_wasted_bytes / GB for cost in costs), "GB")
    conditions = {
        "threads": threads,
        "cache state": f"cold: {COLD_CACHE} experts a layer, {cold.stats.reader}",
        "tokens a measurement": tokens,
        "repeats": repeats,
        "MoE layers": len(container.config.moe_layers),
        "expert bytes": cold.stats.expert_bytes,
        **engine,
    }
    return Table("cold decoding, against the disk", conditions, (Row("decode", figures),))


def bench_warm_decode(
    path: Path, *, threads: int, tokens: int = 8, repeats: int = 7, progress: Progress = lambda what: None, **engine: Any
) -> Table:
    """Decode with every expert in memory, in turn with plain reads of memory.

    Raises:
        BenchError: logits depend on cache or threads.
        OptionError: not every expert could be brought into memory.
    """
    container = Container.open(path)
    config = container.config
    model = open_model(path, cache_experts=config.moe.n_experts, threads=threads, **engine)
    _check_same(path, model)
    progress("reading all experts")
    _warm_up(model)
    memory = random_memory(DEFAULT_BYTES)
    check_read(memory, threads)
    touched = dense_bytes_touched(container, PROMPT + tokens * repeats)
    costs, raw, rates = [], [], []
    run(model, random_tokens(model, PROMPT, 3), "prefill")
    for repeat in range(repeats):
        progress(f"warm decode, {repeat + 1} of {repeats}")
        raw.append(memory.size / read_pass(memory, threads=threads)[0])
        costs.append(run(model, random_tokens(model, tokens, 10 + repeat), "decode"))
        if costs[-1].misses:
            raise OptionError("an expert was not in memory", where="warm decode", expected="no misses", got=costs[-1].misses)
        rates.append((touched * tokens + costs[-1].hits * model.stats.expert_bytes) / costs[-1].wall_seconds)
    figures: dict[str, Any] = {
        "s per token": Measured(tuple(cost.wall_seconds / tokens for cost in costs), "s"),
        "weights touched": Measured(tuple(rate / GB for rate in rates), "GB/s"),
        "raw read": Measured(tuple(rate / GB for rate in raw), "GB/s"),
        "share of raw": ratios(rates, raw),
        **_phases(costs, tokens),
    }
    conditions = {
        "threads": threads,
        "isa": model.stats.isa,
        "cache state": "warm: all experts in memory",
        "tokens a measurement": tokens,
        "repeats": repeats,
        "dense bytes touched": touched,
    }
    return Table("warm decoding, against memory", conditions, (Row("decode", figures),))


def _phases(costs: list[StepCost], tokens: int) -> dict[str, Measured]:
    names = ("disk_wait", "experts", "attention", "head", "other")
    return {name: Measured(tuple(getattr(cost.stats, f"{name}_seconds") / tokens for cost in costs), "s") for name in names}


def _computing_seconds(model: NativeModel, tokens: list[int]) -> float:
    """Seconds of decoding these tokens with their experts in memory: each is decoded, dropped and decoded again."""
    seconds = 0.0
    for token in tokens:
        run(model, [token], "decode")
        model.rewind(1)
        again = run(model, [token], "decode")
        if again.misses:
            raise OptionError("an expert was not in memory", where="the same token again", expected="no misses", got=again.misses)
        seconds += again.wall_seconds
    return seconds


def _warm_up(model: NativeModel) -> None:
    """Prompts of random tokens until none reads anything."""
    experts = model.config.moe.n_experts * len(model.config.moe_layers)
    for seed in range(MOST_WARMING_STEPS):
        run(model, random_tokens(model, WARMING_POSITIONS, 1000 + seed), "prefill")
        model.reset()
        if model.stats.total.cache_misses >= experts:
            return
    raise OptionError(
        "some experts are never chosen", where="warming up", expected=f"{experts} experts read", got=model.stats.total.cache_misses
    )


def _check_same(path: Path, model: NativeModel) -> None:
    """A few steps against an engine with one thread, the scalar kernels and another cache."""
    plain = open_model(path, cache_experts=1, threads=1, isa="scalar", io="buffered")
    tokens = random_tokens(model, 3, 5)
    for token in tokens:
        ours, theirs = (m.forward([token], scope="decode") for m in (model, plain))
        if ours.tobytes() != theirs.tobytes():
            raise BenchError("logits depend on cache, threads or instruction set", where=str(path), expected="equal bits", got="others")
    model.reset()
