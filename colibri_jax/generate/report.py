"""What a run did, for people (a short table, the EXPERT_BUDGET line) and for programs (one JSON object).

Every figure is a counter of `stats.py` or a quotient of two; nothing is estimated here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from colibri_jax.generate.divergence import Divergence
from colibri_jax.generate.loop import Generation
from colibri_jax.generate.notes import budget_is_on, budget_values, prefers_cached
from colibri_jax.generate.speculation_stats import SpeculationStats
from colibri_jax.routing_spec import RoutingOptions, Scope
from colibri_jax.stats import PHASES, STATS_SCOPES, ScopeStats, Stats

JSON_SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class OptionValue:
    """An option's effective value and where it came from: "flag", "default", "auto" (--budget auto), or the environment variable."""

    value: Any
    source: str = "default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """Everything about one finished (or interrupted) generation.

    Attributes:
        generation: tokens and why they ended.
        text: the answer.
        stats: the model's counters over this run.
        routing: routing options that the model ran with.
        budget_scopes: scopes that the budget applied to.
        options: effective options by name.
        notes: lines that were printed about them.
        speculation: what drafts did; None where there were none.
        divergence: of lossy verification from exact decoding; None where it was not asked for.
    """

    generation: Generation
    text: str
    stats: Stats
    routing: RoutingOptions
    budget_scopes: frozenset[Scope]
    options: Mapping[str, OptionValue] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    speculation: SpeculationStats | None = None
    divergence: Divergence | None = None

    def budget_line(self) -> str | None:
        """`EXPERT_BUDGET=4 (dropped 13613 experts, ~257.3 GB I/O saved)`; None with the budget off, and for a policy without one.

        Dropped experts are summed over layers and steps; the gigabytes (10^9 bytes) are `avoided_read_bytes_estimate`. Steps
        that verify drafts are left out and the line says so: an expert that only a rejected draft asked for would not have
        been read without drafts, so that dropping it saved nothing.
        """
        if not budget_is_on(self.routing) or prefers_cached(self.routing):
            return None
        total = ScopeStats()
        for scope in ("prefill", "decode"):
            total = total.plus(self.stats.scopes.get(scope, ScopeStats()))
        budget = ",".join(str(n) for n in budget_values(self.routing))
        saved = _gigabytes(total.avoided_read_bytes_estimate)
        verified = "; verification not counted" if self.stats.scopes.get("verify", ScopeStats()).steps else ""
        if self.stats.backend == "reference":
            what = "the reference reads nothing, so it saves nothing"
            return f"EXPERT_BUDGET={budget} (dropped {total.dropped_experts} experts; {what}{verified})"
        return f"EXPERT_BUDGET={budget} (dropped {total.dropped_experts} experts, ~{saved} GB I/O saved{verified})"

    def table(self) -> Table:
        """A short table, one column per scope in which steps were made."""
        ran = [scope for scope in STATS_SCOPES if self.stats.scopes.get(scope, ScopeStats()).steps]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=True, header_style="")
        table.add_column("")
        for scope in ran:
            # A draft block's steps have the options of decoding.
            budgeted = budget_is_on(self.routing) and ("decode" if scope == "draft" else scope) in self.budget_scopes
            mark = "cache_route" if prefers_cached(self.routing) else "budget"
            table.add_column(f"{scope} ({mark})" if budgeted else scope, justify="right")
        for name, cell in _ROWS:
            if self.stats.backend == "reference" and name in _NATIVE_ROWS:
                continue
            if name == _SWAP_ROW and not prefers_cached(self.routing):
                continue
            table.add_row(name, *(cell(self.stats.scopes[scope]) for scope in ran))
        return table

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data; keys carry units, `schema` numbers their meaning."""
        values = {name: option.value for name, option in self.options.items()}
        engine = {f.name: getattr(self.stats, f.name) for f in dataclasses.fields(self.stats) if f.name != "scopes"}
        return {
            "schema": JSON_SCHEMA,
            "text": self.text,
            "token_ids": list(self.generation.tokens),
            "prompt_tokens": self.generation.prompt_tokens,
            "new_tokens": len(self.generation.tokens),
            "stop_reason": self.generation.stop_reason,
            "stop_token": self.generation.stop_token,
            "options": values,
            "option_sources": {name: option.source for name, option in self.options.items()},
            "routing": dataclasses.asdict(self.routing),
            "budget_scopes": sorted(self.budget_scopes),
            "engine": engine,
            "scopes": {scope: scope_json(stats) for scope, stats in self.stats.scopes.items()},
            "total": scope_json(self.stats.total),
            "swap_share": {scope: stats.swap_share for scope, stats in self.stats.scopes.items()} if prefers_cached(self.routing) else None,
            "budget_line": self.budget_line(),
            "notes": list(self.notes),
            "speculation": None if self.speculation is None else self.speculation.to_json(),
            "divergence": None if self.divergence is None else self.divergence.to_json(),
        }


def scope_json(stats: ScopeStats) -> dict[str, Any]:
    """One scope's counters, then what follows from them; null where a quotient has nothing to divide by."""
    looked_up = stats.cache_hits + stats.cache_misses
    return {
        **dataclasses.asdict(stats),
        "phase_seconds": {phase: _phase(stats, phase) for phase in PHASES},
        "phase_seconds_sum": sum(_phase(stats, phase) for phase in PHASES),
        "tokens_per_second": stats.tokens_per_second if stats.wall_seconds else None,
        "hit_rate": stats.hit_rate if looked_up else None,
        "prefetch_recall": stats.prefetch_recall if stats.foreseeable_experts else None,
        "mass_kept": stats.mass_kept if stats.layer_steps else None,
        "bytes_read_per_position": stats.bytes_read / stats.positions if stats.positions else None,
    }


def _phase(stats: ScopeStats, phase: str) -> float:
    return float(getattr(stats, f"{phase}_seconds"))


def _gigabytes(n_bytes: int) -> str:
    """10^9 bytes with one decimal, or with as many as two significant digits need where one would show nothing."""
    gigabytes = n_bytes / 1e9
    if n_bytes <= 0 or gigabytes >= 0.1:
        return f"{gigabytes:.1f}"
    return f"{gigabytes:.{1 - math.floor(math.log10(gigabytes))}f}"


def _seconds(phase: str) -> Callable[[ScopeStats], str]:
    def cell(s: ScopeStats) -> str:
        seconds = _phase(s, phase)
        return f"{seconds:.3f} s  {seconds / s.wall_seconds:4.0%}" if s.wall_seconds else f"{seconds:.3f} s"

    return cell


def _of_layer_steps(total: int, s: ScopeStats) -> str:
    return f"{total / s.layer_steps:.1f}" if s.layer_steps else "–"


def _read_ahead(s: ScopeStats) -> str:
    useful, wasted = _gigabytes(s.prefetch_useful_bytes), _gigabytes(s.prefetch_wasted_bytes)
    return f"{s.prefetch_recall:.1%} foreseen, {useful} GB useful, {wasted} GB wasted"


# The reference neither reads experts nor tells phases apart.
_NATIVE_ROWS = ("  disk wait", "  expert products", "  attention", "  head", "  other", "bytes read", "cache hit rate", "read ahead")

# Only one policy exchanges experts for others of the position's ranking.
_SWAP_ROW = "swapped for cached"

_ROWS: tuple[tuple[str, Callable[[ScopeStats], str]], ...] = (
    ("tokens", lambda s: f"{s.positions} in {s.steps} steps"),
    ("time", lambda s: f"{s.wall_seconds:.3f} s"),
    ("speed", lambda s: f"{s.tokens_per_second:.2f} tok/s" if s.wall_seconds else "–"),
    ("  disk wait", _seconds("disk_wait")),
    ("  expert products", _seconds("experts")),
    ("  attention", _seconds("attention")),
    ("  head", _seconds("head")),
    ("  other", _seconds("other")),
    ("bytes read", lambda s: f"{_gigabytes(s.bytes_read)} GB"),
    ("cache hit rate", lambda s: f"{s.hit_rate:.1%}" if s.cache_hits + s.cache_misses else "–"),
    ("read ahead", lambda s: _read_ahead(s) if s.foreseeable_experts else "–"),
    ("experts per layer step", lambda s: f"{_of_layer_steps(s.kept_experts, s)} of {_of_layer_steps(s.union_experts, s)}"),
    ("dropped experts", lambda s: str(s.dropped_experts)),
    (_SWAP_ROW, lambda s: f"{s.swap_share:.1%} of slots, {1 - s.swap_share:.1%} agree" if s.routed_slots else "–"),
    ("emptied positions", lambda s: str(s.emptied_positions)),
    ("mass kept", lambda s: f"{s.mass_kept:.4f}" if s.layer_steps else "–"),
)
