"""What speculation did: counts, and the quotients that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from colibri_jax.generate.pausing import Pause
from colibri_jax.routing_spec import Selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """Counts over one speculator's runs. "Experts" are (MoE layer, distinct expert of a step) pairs, "slots" (layer, row, expert) triples.

    Attributes:
        drafter, speculation, acceptance, union_votes, depth: how it ran.
        emitted_tokens: stop tokens included.
        verification_steps, verified_tokens: steps that verified drafts, and tokens that came out of them.
        plain_steps: decode steps, each of one token: `measuring_steps` to know their cost, `paused_steps` while drafting was
            paused, and the rest because there was no draft or room for just one token more.
        drafted, accepted, rejected: per depth (1 first): drafts verified; those that stayed; those that were compared and turned
            down. The others stood behind one that was turned down, or behind the answer's end.
        verify_experts: distinct experts that verification steps used, and so looked up in the cache.
        verify_experts_used: those that a row which stayed used.
        verify_slots, verify_slots_used: the same for (row, expert) pairs.
        plain_experts: distinct experts of plain steps.
        bytes_read: by all steps after prefill, drafting included; 0 in the reference.
        pauses: when drafting was off, for how long and why.
    """

    drafter: str = ""
    speculation: str = "exact"
    acceptance: str = "equal"
    union_votes: str = "uniform"
    depth: int = 0
    emitted_tokens: int = 0
    verification_steps: int = 0
    verified_tokens: int = 0
    plain_steps: int = 0
    measuring_steps: int = 0
    paused_steps: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()
    verify_experts: int = 0
    verify_experts_used: int = 0
    verify_slots: int = 0
    verify_slots_used: int = 0
    plain_experts: int = 0
    bytes_read: int = 0
    pauses: tuple[Pause, ...] = ()

    @property
    def lossy(self) -> bool:
        """Whether tokens may be others than without drafts, beyond their distribution."""
        return self.speculation == "union"

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts over verified ones."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def tokens_per_verification(self) -> float | None:
        """Tokens emitted per verification step, the one that needs no draft included."""
        return self.verified_tokens / self.verification_steps if self.verification_steps else None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes read after prefill per emitted token."""
        return self.bytes_read / self.emitted_tokens if self.emitted_tokens else None

    @property
    def verify_experts_rejected(self) -> int:
        """Experts that verification steps used for rejected drafts alone."""
        return self.verify_experts - self.verify_experts_used

    def with_verification(self, n_drafts: int, n_accepted: int, n_emitted: int, selections: Sequence[Selection]) -> SpeculationStats:
        """One verification step more.

        Args:
            n_drafts: at least 1.
            n_accepted: drafts that stayed.
            n_emitted: n_accepted + 1; or n_accepted, where an accepted draft ended the answer. As many rows stay in the cache.
            selections: of all layers.
        """
        depths = range(self.depth)
        compared = n_accepted < n_drafts and n_emitted > n_accepted
        used = [s.ids[:n_emitted] for s in selections]
        return dataclasses.replace(
            self,
            emitted_tokens=self.emitted_tokens + n_emitted,
            verification_steps=self.verification_steps + 1,
            verified_tokens=self.verified_tokens + n_emitted,
            drafted=tuple(self.drafted[d] + (d < n_drafts) for d in depths),
            accepted=tuple(self.accepted[d] + (d < n_accepted) for d in depths),
            rejected=tuple(self.rejected[d] + (compared and d == n_accepted) for d in depths),
            verify_experts=self.verify_experts + sum(s.kept.size for s in selections),
            verify_experts_used=self.verify_experts_used + sum(np.unique(ids[ids >= 0]).size for ids in used),
            verify_slots=self.verify_slots + sum(int((s.ids >= 0).sum()) for s in selections),
            verify_slots_used=self.verify_slots_used + sum(int((ids >= 0).sum()) for ids in used),
        )

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, quotients included; null where there is nothing to divide by."""
        return {
            **dataclasses.asdict(self),
            "lossy": self.lossy,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_verification": self.tokens_per_verification,
            "verify_experts_rejected": self.verify_experts_rejected,
            "bytes_per_token": self.bytes_per_token,
        }

    def lines(self) -> tuple[str, ...]:
        """A few lines for people."""
        if not self.drafter:
            return ()
        rate, per_step, per_token = self.acceptance_rate, self.tokens_per_verification, self.bytes_per_token
        mode = f"{self.speculation} (lossy, votes {self.union_votes})" if self.lossy else self.speculation
        how = f"{self.drafter}, depth {self.depth}, {mode}, acceptance {self.acceptance}"
        lines = [f"drafts: {how}"]
        if rate is not None and per_step is not None:
            by_depth = " ".join(f"{a}/{d}" for a, d in zip(self.accepted, self.drafted, strict=True))
            lines.append(f"  accepted {rate:.1%} ({by_depth} by depth); {per_step:.2f} tokens per verification step")
            lines.append(
                f"  {self.verification_steps} verification steps used {self.verify_experts} experts, "
                f"{self.verify_experts_rejected} of them for rejected drafts alone"
            )
        lines.append(f"  {self.plain_steps} steps without drafts: {self.measuring_steps} to measure, {self.paused_steps} paused")
        if self.bytes_read and per_token is not None:
            lines.append(f"  {per_token / 1e6:.3f} MB read per emitted token")
        lines.extend(f"  paused after {p.at_token} tokens for {p.tokens}: {p.reason}" for p in self.pauses)
        return tuple(lines)
