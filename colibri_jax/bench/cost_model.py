"""What decoding a token costs in bytes and seconds, from the sizes of a model and the rates of a machine; and whether that is so.

Per token, with L MoE layers, N experts used in each, a cache that holds a share h of what is asked for, E bytes of an expert, W bytes of
weights that every token touches (shared experts S of each layer included), keys and values K, a disk of d and a memory of m bytes per
second, n = N (1 − h) experts to be read in each layer and l = min(1, n):

    read    = L · n · E
    beside  = (S + (N − l) · E) / (a · m)                      in each of L layers
    waiting = l · max(0, 1 − beside / (n · E / d))             share of a layer's reads in which nothing is left to compute
    between = (W − L · S + K + L · l · E) / m · (waiting / b + (1 − waiting) / a)
    seconds = between + L · max(n · E / d, beside)

Assumptions, in the order of the terms:

- Every expert that is used and not cached is read once, whole. What a budget drops is not read.
- A layer's shared experts, its cached experts and all experts but the last are computed beside its reads; the longer of the two counts.
- Which experts a layer needs is known only when its router has been computed. So attention, routers, dense layers and head (W − L · S and
  K), and each layer's last expert, which arrives last, are computed while nothing is read. Nothing is looked ahead (`--pilot` hides most
  of this term, at the price of reads in vain).
- One position is computed at the rate at which weights come from memory, of which decoding reaches a = `MEMORY_SHARE` over a whole token,
  and b = `WAKING_SHARE` where the processor comes out of a wait. The arithmetic of attention over long contexts is not counted.
- h depends on the share of a layer's experts that the cache holds, and on nothing else. Layers with and without a miss are averaged.
- The disk delivers the rate that random experts have with as many reads in flight, at every moment at which there is something to read.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colibri_jax.bench.decode import IO_DEPTH, PROMPT
from colibri_jax.bench.kernels import DEFAULT_BYTES, check_read, random_memory
from colibri_jax.bench.model import COLD_CACHE, ExpertBlocks, dense_bytes_touched, open_model, random_tokens, run
from colibri_jax.bench.report import GB, Measured, Progress, Row, Table, ratios
from colibri_jax.container.inspect import kv_bytes_per_position
from colibri_jax.container.reader import Container
from colibri_jax.engine.passes import read_pass
from colibri_jax.errors import OptionError
from colibri_jax.routing_spec import RoutingOptions
from colibri_jax.tensors import EXPERT_PARTS, expert_roles

# Of the raw rate of memory, what a token reaches whose weights are all in memory: "warm decoding" in validation/records/limits.md.
MEMORY_SHARE = 0.842
# The same after waiting for the disk: attention of a layer takes 4.76 ms there in cold decoding and 3.88 ms in warm.
WAKING_SHARE = 0.842 * 3.88 / 4.76


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What a token of a model touches.

    Attributes:
        moe_layers, experts, top_k: layers with experts, experts of each, experts that a position picks.
        expert_bytes: one expert with its scales.
        dense_bytes: weights that every token touches, shared experts included.
        shared_bytes: of these, the shared experts of one MoE layer.
        context_bytes: keys and values that a token reads.
    """

    moe_layers: int
    experts: int
    top_k: int
    expert_bytes: int
    dense_bytes: int
    shared_bytes: int
    context_bytes: int

    @classmethod
    def of(cls, container: Container, positions: int) -> ModelSizes:
        """Sizes of a container, for a token that follows `positions` others.

        Raises:
            OptionError: it has no MoE layer, so that there is nothing to budget.
        """
        config = container.runnable_config
        if not config.moe_layers:
            raise OptionError("the model has no experts", where=str(container.path), expected="an MoE layer", got="none")
        first = config.moe_layers[0]
        shared = [container.entries.get(f"layers.{first}.shared.{part}") for part in EXPERT_PARTS]
        return cls(
            moe_layers=len(config.moe_layers),
            experts=config.moe.n_experts,
            top_k=config.moe.router.top_k,
            expert_bytes=sum(container.entry(role).total_bytes for role in expert_roles(first, 0)),
            dense_bytes=dense_bytes_touched(container, positions),
            shared_bytes=sum(entry.total_bytes for entry in shared if entry is not None),
            context_bytes=kv_bytes_per_position(config) * positions,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second.

    Attributes:
        disk: of random experts past the page cache.
        memory: of plain reads of memory, by all threads.
        memory_share: of `memory`, what decoding reaches.
        waking_share: of `memory`, what it reaches after having waited for the disk.
    """

    disk: float
    memory: float
    memory_share: float = MEMORY_SHARE
    waking_share: float = WAKING_SHARE

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0.0:
                raise OptionError("not a rate", where=field.name, expected="above 0", got=getattr(self, field.name))


@dataclasses.dataclass(frozen=True)
class HitCurve:
    """Hit rate over the share of a layer's experts that the cache holds, linear between measured points.

    Attributes:
        points: (share, hit rate), shares ascending between 0 and 1; (0, 0) and (1, 1) are added.
    """

    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.points]
        inside = all(0.0 < share < 1.0 and 0.0 <= rate <= 1.0 for share, rate in self.points)
        if not inside or shares != sorted(set(shares)):
            raise OptionError("not a curve", where="points", expected="ascending shares and rates, between 0 and 1", got=self.points)

    def at(self, share: float) -> float:
        """The hit rate where the cache holds such a share."""
        points = ((0.0, 0.0), *self.points, (1.0, 1.0))
        share = min(max(share, 0.0), 1.0)
        right = min(bisect.bisect_right([x for x, _ in points], share), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (y1 - y0) * (share - x0) / (x1 - x0)


# Every expert as likely as any other, as in models of random weights: a cache holds of what is asked for what it holds of all.
UNIFORM = HitCurve()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCost:
    """One decoded token.

    Attributes:
        experts: used in each MoE layer.
        hit_rate: of these, the share that was cached.
        disk_bytes, memory_bytes: read from disk; weights, keys and values touched in memory.
        between_seconds: computing while nothing is read.
        seconds: in all.
    """

    experts: float
    hit_rate: float
    disk_bytes: float
    memory_bytes: float
    between_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The inverse of `seconds`."""
        return 1.0 / self.seconds


def token_cost(sizes: ModelSizes, rates: Rates, *, slots: int, hits: HitCurve = UNIFORM, experts: float | None = None) -> TokenCost:
    """Bytes and seconds of a token; the formula stands at the top of this file.

    Args:
        sizes: of the model.
        rates: of the machine.
        slots: experts that the cache holds of each layer.
        hits: how often it has what is asked for.
        experts: used in each MoE layer: N under a budget of N; by default all that a position picks. At most those.

    Raises:
        OptionError: fewer than no slots, or no experts.
    """
    used = float(sizes.top_k if experts is None else min(experts, sizes.top_k))
    if used <= 0.0 or slots < 0:
        raise OptionError("out of range", where="experts, slots", expected="above 0; 0 or more", got=(experts, slots))
    hit_rate = hits.at(slots / sizes.experts)
    layers, expert = sizes.moe_layers, sizes.expert_bytes
    read = used * (1.0 - hit_rate)
    last, disk = min(1.0, read), read * expert / rates.disk
    beside = (sizes.shared_bytes + (used - last) * expert) / (rates.memory * rates.memory_share)
    waiting = last * max(0.0, 1.0 - beside / disk) if disk else 0.0
    between = (sizes.dense_bytes - layers * sizes.shared_bytes + sizes.context_bytes + layers * last * expert) / rates.memory
    between *= waiting / rates.waking_share + (1.0 - waiting) / rates.memory_share
    return TokenCost(
        experts=used,
        hit_rate=hit_rate,
        disk_bytes=layers * read * expert,
        memory_bytes=sizes.dense_bytes + sizes.context_bytes + layers * used * expert,
        between_seconds=between,
        seconds=between + layers * max(disk, beside),
    )


@dataclasses.dataclass
class _Series:
    """Measurements of one budget, in the order in which they were taken."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    predicted: list[float] = dataclasses.field(default_factory=list)
    bytes_over_predicted: list[float] = dataclasses.field(default_factory=list)
    disk: list[float] = dataclasses.field(default_factory=list)
    memory: list[float] = dataclasses.field(default_factory=list)

    def row(self, what: str) -> Row:
        return Row(
            what,
            {
                "s per token": Measured(tuple(self.seconds), "s"),
                "predicted": Measured(tuple(self.predicted), "s"),
                "measured / predicted": ratios(self.seconds, self.predicted),
                "bytes / predicted": Measured(tuple(self.bytes_over_predicted)),
                "raw O_DIRECT": Measured(tuple(rate / GB for rate in self.disk), "GB/s"),
                "raw read of memory": Measured(tuple(rate / GB for rate in self.memory), "GB/s"),
            },
        )


def bench_cost_model(
    path: Path,
    *,
    threads: int,
    budgets: Sequence[int] = (0, 6, 4, 2),
    tokens: int = 6,
    repeats: int = 7,
    hits: HitCurve = UNIFORM,
    memory_bytes: int = DEFAULT_BYTES,
    progress: Progress = lambda what: None,
    **engine: Any,
) -> Table:
    """Decode with a cold cache under each budget, against the prediction from rates that are measured in turn with it.

    Args:
        path: a container.
        budgets: 0 is off.
        tokens: decoded in one measurement.
        hits: of the container's routing; random weights route uniformly.
        memory_bytes: read in turn, for the rate of memory; more than any cache holds.
        engine: further arguments of `colibri_jax.load`.

    Returns:
        A row for each budget: seconds of a token as measured and as predicted, their quotient, and the rates.
    """
    container = Container.open(path)
    model = open_model(path, cache_experts=COLD_CACHE, threads=threads, io="direct", io_threads=IO_DEPTH, **engine)
    blocks, memory = ExpertBlocks(container, seed=2), random_memory(memory_bytes)
    check_read(memory, threads)
    sizes = ModelSizes.of(container, PROMPT)
    series = {budget: _Series() for budget in budgets}
    run(model, random_tokens(model, PROMPT, 3), "prefill")
    for repeat in range(repeats):
        for budget, found in series.items():
            progress(f"budget {budget or 'off'}, {repeat + 1} of {repeats}")
            used = min(budget or sizes.top_k, sizes.top_k)
            # As much as the engine will read, so that a slow moment of the disk lasts as long for both.
            found.disk.append(blocks.read(tokens * used * sizes.moe_layers, depth=IO_DEPTH))
            found.memory.append(memory.size / read_pass(memory, threads=threads)[0])
            model.reroute(RoutingOptions(budget=budget), {"decode"})
            cost = run(model, random_tokens(model, tokens, 10 + repeat), "decode")
            model.rewind(tokens)
            rates = Rates(disk=found.disk[-1], memory=found.memory[-1])
            expected = token_cost(sizes, rates, slots=COLD_CACHE, hits=hits, experts=used)
            found.seconds.append(cost.wall_seconds / tokens)
            found.predicted.append(expected.seconds)
            found.bytes_over_predicted.append(cost.useful_bytes / tokens / expected.disk_bytes)
    conditions = {
        "threads": threads,
        "cache state": f"cold: {COLD_CACHE} experts a layer, {model.stats.reader}",
        "tokens a measurement": tokens,
        "repeats": repeats,
        "MoE layers": sizes.moe_layers,
        "shares of memory's rate": f"{MEMORY_SHARE:.3f}, after a wait {WAKING_SHARE:.3f}",
        **engine,
    }
    return Table(
        "decoding, against the cost model", conditions, tuple(found.row(f"budget {budget or 'off'}") for budget, found in series.items())
    )
