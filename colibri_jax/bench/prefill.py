"""Prompts: what a step of many positions reads and how fast it goes; and runs under several budgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colibri_jax.bench.model import COLD_CACHE, StepCost, open_model, random_tokens, run
from colibri_jax.bench.report import GB, BenchError, Measured, Progress, Row, Table, budget_name
from colibri_jax.errors import OptionError
from colibri_jax.plots import Panel
from colibri_jax.routing_spec import SCOPES, RoutingOptions, Scope


def bench_prefill(
    path: Path,
    *,
    threads: int,
    positions: Sequence[int] = (14, 512),
    repeats: int = 5,
    progress: Progress = lambda what: None,
    **engine: Any,
) -> Table:
    """Prompts in one step with a cold cache.

    Raises:
        BenchError: a step read other bytes than those of the experts that it used, each once.
    """
    rows = []
    for n in positions:
        costs: list[StepCost] = []
        unions: list[int] = []
        for repeat in range(repeats):
            progress(f"prefill of {n} positions, {repeat + 1} of {repeats}")
            model = open_model(path, cache_experts=1, threads=threads, context_positions=max(positions), **engine)
            costs.append(run(model, random_tokens(model, n, repeat), "prefill"))
            unions.append(sum(selection.union_size for selection in model.selections))
            expected = unions[-1] * model.stats.expert_bytes
            if costs[-1].useful_bytes != expected:
                raise BenchError(
                    "a step read other experts than it used", where=f"{n} positions", expected=expected, got=costs[-1].useful_bytes
                )
        figures: dict[str, Any] = {
            "positions": n,
            "tok/s": Measured(tuple(n / cost.wall_seconds for cost in costs)),
            "union": Measured(tuple(float(union) for union in unions)),
            "read": Measured(tuple(cost.useful_bytes / GB for cost in costs), "GB"),
            "read / (union x expert)": 1.0,
            "disk_wait": Measured(tuple(cost.stats.disk_wait_seconds for cost in costs), "s"),
            "experts": Measured(tuple(cost.stats.experts_seconds for cost in costs), "s"),
            "attention": Measured(tuple(cost.stats.attention_seconds for cost in costs), "s"),
        }
        rows.append(Row("prefill", figures))
    conditions = {"threads": threads, "isa": model.stats.isa, "cache state": f"cold, {model.stats.reader}", "repeats": repeats}
    return Table("prompts in one step", conditions, tuple(rows))


def bench_sweep(
    path: Path,
    *,
    threads: int,
    budgets: Sequence[int | tuple[int, ...]] = (0, 12, 6, 4),
    scopes: Sequence[frozenset[Scope]] = (frozenset({"decode"}), frozenset(SCOPES)),
    prompt: int = 14,
    tokens: int = 32,
    cache_experts: int = COLD_CACHE,
    progress: Progress = lambda what: None,
    **engine: Any,
) -> Table:
    """The expert budget's own table: a prompt and decoded tokens under each budget and scope.

    Raises:
        OptionError: a budget outside its domain.
    """
    if not budgets:
        raise OptionError("no budgets", where="budgets", expected="one or more", got="none")
    rows = []
    for acting in scopes:
        name = "all" if acting == frozenset(SCOPES) else " ".join(sorted(acting))
        for budget in budgets:
            progress(f"budget {budget_name(budget)}, scope {name}")
            model = open_model(
                path, cache_experts=cache_experts, threads=threads, routing=RoutingOptions(budget=budget), budget_scopes=acting, **engine
            )
            prefill = run(model, random_tokens(model, prompt, 3), "prefill")
            decode = run(model, random_tokens(model, tokens, 10), "decode")
            total = model.stats.total
            rows.append(
                Row(
                    f"scope {name}",
                    {
                        "budget": budget if isinstance(budget, int) and budget else budget_name(budget),
                        "tok/s": tokens / decode.wall_seconds,
                        "hit rate": total.hit_rate,
                        "prefill": prefill.wall_seconds,
                        "decode": decode.wall_seconds,
                        "dropped": total.dropped_experts,
                        "emptied": total.emptied_positions,
                        "mass kept": total.mass_kept,
                        "read GB": total.bytes_read / GB,
                    },
                )
            )
    conditions = {
        "threads": threads,
        "cache state": f"cold, {cache_experts} experts a layer, {model.stats.reader}",
        "prompt": prompt,
        "tokens": tokens,
        "policy": "aggregate",
    }
    return Table("budgets: seconds, bytes and what was dropped", conditions, tuple(rows))


def sweep_panels(table: Table) -> list[Panel]:
    """What a sweep's plot shows: speed, bytes and router mass over the budget, a line per scope."""
    scopes = dict.fromkeys(row.what for row in table.rows)
    budgets = list(dict.fromkeys(str(row.figures["budget"]) for row in table.rows))
    return [
        Panel(
            "expert budget",
            name,
            budgets,
            {scope: [float(str(row.figures[figure])) for row in table.rows if row.what == scope] for scope in scopes},
        )
        for figure, name in (("tok/s", "decoded tokens per second"), ("read GB", "GB read"), ("mass kept", "router mass kept"))
    ]
