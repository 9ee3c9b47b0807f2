"""What GLM-5.2 would do on hosts of several sizes: cache slots, bytes and seconds per token, budget off and on, by the cost model.

    python validation/bench/ram_tiers.py [--record] [--json]
    python validation/bench/ram_tiers.py --confirm DIR [--confirm DIR]... [--record]

Sizes follow from the configuration, slots from the engine's own plan of memory, hit rates from the model that ships, which is not
GLM-5.2. With --confirm the cost model is held against decoding on models that make_model.py wrote with --glm-layers; the machine should
have nothing else to do. Exit status 1 where measured and predicted seconds of a token are more than 15 % apart.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from colibri_jax.bench import Measured, Table
from colibri_jax.bench.cost_model import HitCurve, ModelSizes, Rates, TokenCost, bench_cost_model, token_cost
from colibri_jax.bench.model import open_model
from colibri_jax.bench.report import GB
from colibri_jax.config import ModelConfig
from colibri_jax.container.plan import DEFAULT_SHARD_BYTES, PlannedShard, plan_shards
from colibri_jax.container.reader import Container, TensorEntry
from colibri_jax.engine.options import DEFAULT_MEMORY_SHARE, EngineOptions, plan_engine
from colibri_jax.errors import MemoryBudgetError
from colibri_jax.quality.recommended import RecommendedSetting, fingerprint_of, read_recommended
from colibri_jax.quality.windows import read_windows
from colibri_jax.quant import DEFAULT_GROUP_SIZE, WeightFormat
from colibri_jax.routing_spec import RoutingOptions
from colibri_jax.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "colibri_jax" / "models" / "tiny-glm-moe-dsa"
TEXT = ROOT / "validation" / "train" / "heldout.jsonl"
RECORD = ROOT / "validation" / "records" / "ram_tiers.md"

HOSTS_GB = (16, 24, 32, 64, 128)
DISKS_GB = (1, 2, 7)
MEMORY_GB_S = 35.0  # raw read by both threads of the machine of validation/records/limits.md
CONTEXT, SHORT_CONTEXT = 4096, 1024  # positions that the KV cache has room for
POSITIONS = 256  # positions before the token that is counted
# Where 70 % of a host are too few, all but this much are taken, and a short context.
LEFT_FOR_OTHERS_GB = 2
THREADS = 8  # of the host; they have a little working memory each

# The curve of hits: windows from all over the held-out text, decoded token by token; the first ones fill the cache.
SLOTS = (1, 2, 4, 8, 16, 32)
WINDOW, WINDOWS, WARMING = 256, 12, 4

BOUND = 0.15
CONFIRMED_BUDGETS = (0, 6, 4, 2)
SMALL = "shipped small model, not GLM-5.2"

# GLM-5.2. How many of its layers choose positions anew is not known to us; every fourth is taken to.
GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 1,
    "max_position_embeddings": 202752,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compared with budget off.

    Attributes:
        name: for the table.
        experts: used in each layer by a token.
        hits: with it.
        setting: where its quality was measured.
    """

    name: str
    experts: float
    hits: HitCurve
    setting: RecommendedSetting | None = None


@dataclasses.dataclass(frozen=True)
class Tier:
    """A host.

    Attributes:
        host_gb: its memory.
        ram_bytes: what the engine takes of it.
        asked: whether that has to be asked for with --ram-gb, for a short context.
        slots: experts of each layer in the cache; None where the engine does not start.
        least_bytes: what it would need at least, where it does not start by itself; else 0.
    """

    host_gb: int
    ram_bytes: int
    asked: bool
    slots: int | None
    least_bytes: int


def planned_container(raw: dict[str, Any]) -> Container:
    """A container as `convert` would write it, without any file."""
    config = ModelConfig.from_hf(raw)
    entries: dict[str, TensorEntry] = {}
    for shard in plan_shards(config, "rows16", DEFAULT_GROUP_SIZE, DEFAULT_SHARD_BYTES):
        entries.update(_entries(shard))
    return Container(Path("planned"), config, raw, entries, (), True)


def _entries(shard: PlannedShard) -> Iterator[tuple[str, TensorEntry]]:
    offset = 0
    for matrix in shard.matrices:
        found: list[TensorEntry] = []
        for tensor, fmt in zip(matrix.tensors, (matrix.format, WeightFormat(32)), strict=False):
            shape = matrix.spec.shape if not found else tensor.shape
            found.append(TensorEntry(tensor.name, Path("planned") / shard.name, offset, tensor.nbytes, fmt, shape))
            offset += tensor.nbytes
        yield matrix.spec.role, dataclasses.replace(found[0], scales=found[1] if len(found) > 1 else None)


def make_tier(container: Container, host_gb: int) -> Tier:
    """The engine's plan on a host with so much memory, all of it free: by default, and if that does not do, with all but a little."""
    host, least = int(host_gb * GB), 0
    tries = ((round(DEFAULT_MEMORY_SHARE * host), CONTEXT, False), (host - int(LEFT_FOR_OTHERS_GB * GB), SHORT_CONTEXT, True))
    for ram, context, asked in tries:
        options = EngineOptions(ram_bytes=ram, context_positions=context, threads=THREADS)
        try:
            return Tier(host_gb, ram, asked, plan_engine(container, options, RoutingOptions(), free_bytes=host).cache_experts, least)
        except MemoryBudgetError as error:
            least = int(str(error.expected).removeprefix(">= ").split()[0])
    return Tier(host_gb, ram, asked, None, least)


def measure_hits(routing: RoutingOptions, name: str, say: Callable[[str], None]) -> HitCurve:
    """Hit rates of the model that ships under these options in decode steps, by the engine's own counters."""
    text = read_windows([TEXT], ChatTokenizer.from_directory(SHIPPED), WINDOW)
    windows = text[:: len(text) // WINDOWS][:WINDOWS, :-1]
    points = []
    for slots in SLOTS:
        say(f"hit rates, {name}, {slots} slots")
        model = open_model(SHIPPED, cache_experts=slots, routing=routing, io="buffered", threads=1)
        before = model.stats.scopes["decode"]
        for number, window in enumerate(windows):
            model.reset()
            for token in window.tolist():
                model.forward([token], scope="decode", logits="last")
            if number == WARMING - 1:
                before = model.stats.scopes["decode"]
        after = model.stats.scopes["decode"]
        hits, misses = after.cache_hits - before.cache_hits, after.cache_misses - before.cache_misses
        points.append((slots / model.config.moe.n_experts, hits / (hits + misses)))
    return HitCurve(tuple(points))


def make_plans(budget: int | None, say: Callable[[str], None]) -> tuple[Plan, Plan]:
    """Budget off, and a budget: the one given, else the recommended setting of the model that ships, else 6."""
    shipped, top_k = Container.open(SHIPPED), GLM["num_experts_per_tok"]
    recommended = None if budget else read_recommended(SHIPPED, fingerprint_of(shipped))
    setting = None if recommended is None else recommended.best("decode")
    routing = RoutingOptions(budget=budget or 6, denominator="frozen") if setting is None else setting.routing
    name = f"{routing.budget}" if setting is None else setting.name
    experts = float(budget or 6) if setting is None else top_k * setting.costs.expert_bytes_share.value
    off = Plan("off", top_k, measure_hits(RoutingOptions(), "budget off", say))
    return off, Plan(name, experts, measure_hits(routing, f"budget {name}", say), setting)


def costs_of(sizes: ModelSizes, tier: Tier, plan: Plan, memory_gb_s: float) -> list[TokenCost]:
    """A token on this host, for each disk; nothing where the engine does not start."""
    if tier.slots is None:
        return []
    return [
        token_cost(sizes, Rates(disk=disk * GB, memory=memory_gb_s * GB), slots=tier.slots, hits=plan.hits, experts=plan.experts)
        for disk in DISKS_GB
    ]


def table_lines(sizes: ModelSizes, tiers: Sequence[Tier], plans: Sequence[Plan], memory_gb_s: float) -> Iterator[str]:
    """The table of tiers, as Markdown."""
    speeds = [f"tok/s at {DISKS_GB[0]} GB/s", *(f"{disk} GB/s" for disk in DISKS_GB[1:])]
    quality = [f"{figure} ({SMALL})" for figure in ("KLD", "PPL ×", "task points lost")]
    head = ["host", "engine takes", f"slots a layer, of {sizes.experts}", "budget", "experts a layer", "hit rate", "read a token"]
    yield f"| {' | '.join([*head, *speeds, *quality])} |"
    yield f"|{' --- |' * (len(head) + len(speeds) + len(quality))}"
    for tier in tiers:
        takes = f"{tier.ram_bytes / GB:.1f} GB" + (f" (`--ram-gb {tier.ram_bytes / GB:.0f}`)" if tier.asked else "")
        for plan in plans:
            costs = costs_of(sizes, tier, plan, memory_gb_s)
            cells = [f"{tier.host_gb} GB", takes, str(tier.slots), plan.name]
            if costs:
                cells += [f"{costs[0].experts:.3g}", f"{costs[0].hit_rate:.0%}", f"{costs[0].disk_bytes / GB:.1f} GB"]
                cells += [f"{cost.tokens_per_second:.2f}" for cost in costs]
            else:
                cells[2] = f"needs {tier.least_bytes / GB:.1f} GB"
                cells += ["–"] * (3 + len(DISKS_GB))
            stated = None if plan.setting is None else plan.setting.costs
            figures = [] if stated is None else [stated.kld, stated.ppl_ratio, stated.task_points_lost]
            cells += [f"{figure.value:.4g} (+ {figure.margin:.1g})" for figure in figures] or ["0", "1", "0"] * (plan.name == "off")
            cells += ["–"] * (len(head) + len(speeds) + len(quality) - len(cells))
            yield f"| {' | '.join(cells)} |"


def apart(table: Table) -> dict[str, float]:
    """How far the median of measured over predicted is from 1, by row."""
    found = {}
    for row in table.rows:
        quotient = row.figures["measured / predicted"]
        assert isinstance(quotient, Measured)
        found[row.what] = abs(quotient.median - 1.0)
    return found


def paragraph(text: str) -> list[str]:
    """Words of a text, in lines."""
    return textwrap.wrap(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def record_lines(
    sizes: ModelSizes, tiers: Sequence[Tier], plans: Sequence[Plan], memory_gb_s: float, confirmed: Sequence[Table]
) -> Iterator[str]:
    """Everything, as Markdown."""
    experts = sizes.moe_layers * sizes.experts * sizes.expert_bytes
    yield "# GLM-5.2 on hosts of several sizes"
    yield ""
    yield from paragraph(
        f"""Written by `python validation/bench/ram_tiers.py --record`. An estimate: `colibri_jax/bench/cost_model.py` has the formula
        and what it assumes. GB are 10^9 bytes. GLM-5.2 in int4 with groups of {DEFAULT_GROUP_SIZE} has {sizes.moe_layers} layers of
        {sizes.experts} experts of {sizes.expert_bytes / 1e6:.1f} MB, {experts / GB:.0f} GB in all; every token touches
        {sizes.dense_bytes / GB:.1f} GB of other weights. Memory is read at {memory_gb_s:g} GB/s. Slots are what the engine plans
        beside a KV cache of {CONTEXT} positions with {DEFAULT_MEMORY_SHARE:.0%} of the host, all of which it takes to be free. Where
        that is too little, a KV cache of {SHORT_CONTEXT} positions and all but {LEFT_FOR_OTHERS_GB} GB are tried, for which
        `--ram-gb` has to ask."""
    )
    yield ""
    yield from table_lines(sizes, tiers, plans, memory_gb_s)
    yield ""
    if plans[1].setting is not None:
        yield from paragraph(
            f"""Experts a layer under *{plans[1].name}* are {plans[1].experts / plans[0].experts:.0%} of those without a budget, as on the
            {SMALL}; where a setting keeps a share of votes instead of a count, another router keeps another number. In brackets stands
            what a repeated measurement may be above the figure."""
        )
        yield ""
    yield f"## Hit rates: {SMALL}"
    yield ""
    yield from paragraph(
        f"""Decode steps on held-out text, {(WINDOWS - WARMING) * WINDOW} tokens, by the engine's counters. They enter by the share of
        a layer's experts that is cached. Of GLM-5.2 itself one figure is public: 9.3 % at 2 slots a layer, in colibri, whose cache is
        LRU. This curve gives {plans[0].hits.at(2 / sizes.experts):.1%} there; so where slots are few the table is rather too low than
        too high."""
    )
    yield ""
    yield f"| share of a layer cached |{''.join(f' {share:.1%} |' for share, _ in plans[0].hits.points)}"
    yield f"| --- |{' --- |' * len(SLOTS)}"
    for plan in plans:
        yield f"| budget {plan.name} |{''.join(f' {rate:.1%} |' for _, rate in plan.hits.points)}"
    yield ""
    yield "## The cost model against decoding"
    yield ""
    if not confirmed:
        yield "Not confirmed in this run."
    for table in confirmed:
        yield f"{', '.join(f'{name}: {value}' for name, value in table.conditions.items())}. Bound: {BOUND:.0%} at the median."
        yield ""
        yield f"| | {' | '.join(row.what for row in table.rows)} |"
        yield f"| --- |{' --- |' * len(table.rows)}"
        for name in table.figure_names:
            yield f"| {name} | {' | '.join(row.cell(name) for row in table.rows)} |"
        yield ""


@click.command()
@click.option("--budget", type=click.IntRange(min=1), help="Experts a layer, instead of the recommended setting (without one: 6).")
@click.option(
    "--memory-gb-s", type=click.FloatRange(min=0.1), default=MEMORY_GB_S, show_default=True, help="Raw rate of the host's memory."
)
@click.option(
    "--confirm",
    "models",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hold the cost model against decoding on this model of random weights; repeatable.",
)
@click.option("--tokens", type=click.IntRange(min=1), default=6, show_default=True, help="Confirming: decoded in one measurement.")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Confirming: measurements of each budget.")
@click.option("--record", is_flag=True, help=f"Write validation/records/{RECORD.name}.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(budget: int | None, memory_gb_s: float, models: tuple[Path, ...], tokens: int, repeats: int, record: bool, as_json: bool) -> None:
    """Estimate GLM-5.2 on several hosts, and confirm the estimate's model. Exit status 1 where it is more than 15 % off."""
    console, threads = Console(stderr=True), len(os.sched_getaffinity(0))
    with console.status("") as status:
        status.update("planning")
        container = planned_container(GLM)
        sizes = ModelSizes.of(container, POSITIONS)
        tiers = [make_tier(container, host) for host in HOSTS_GB]
        confirmed = [
            bench_cost_model(path, threads=threads, budgets=CONFIRMED_BUDGETS, tokens=tokens, repeats=repeats, progress=status.update)
            for path in models
        ]
        plans = make_plans(budget, status.update)
    off_by = [apart(table) for table in confirmed]
    passed = all(distance <= BOUND for one in off_by for distance in one.values())
    for table, one in zip(confirmed, off_by, strict=True):
        for row in table.rows:
            verdict = "within" if one[row.what] <= BOUND else "NOT within"
            console.print(
                f"{table.conditions['MoE layers']} MoE layers, {row.what}: measured / predicted {row.cell('measured / predicted')}, "
                f"{verdict} {BOUND:.0%}"
            )
    if record:
        RECORD.write_text("\n".join(record_lines(sizes, tiers, plans, memory_gb_s, confirmed)).rstrip() + "\n", encoding="utf-8")
    if as_json:
        rows = [
            {
                **dataclasses.asdict(tier),
                "budget": plan.name,
                "by_disk": {
                    disk: dataclasses.asdict(cost) for disk, cost in zip(DISKS_GB, costs_of(sizes, tier, plan, memory_gb_s), strict=False)
                },
            }
            for tier in tiers
            for plan in plans
        ]
        curves = {plan.name: plan.hits.points for plan in plans}
        tables = [table.to_json() for table in confirmed]
        answer = {"sizes": dataclasses.asdict(sizes), "tiers": rows, "hit_curves": curves, "confirmed": tables, "passed": passed}
        click.echo(json.dumps(answer))
    else:
        click.echo("\n".join(table_lines(sizes, tiers, plans, memory_gb_s)))
    sys.exit(not passed)


if __name__ == "__main__":
    main()
