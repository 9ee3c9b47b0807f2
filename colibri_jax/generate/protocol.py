"""The one interface that reference and native implement, and everything else is written against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from colibri_jax.config import ModelConfig
from colibri_jax.routing_spec import RoutingOptions, Rows, RowVotes, Scope, Selection
from colibri_jax.stats import Stats


class LanguageModel(Protocol):
    """A model with a KV cache that grows by `forward` and shrinks by `rewind`."""

    @property
    def config(self) -> ModelConfig:
        """The model's description."""

    @property
    def routing(self) -> RoutingOptions:
        """Options in the scopes that the budget applies to."""

    @property
    def budget_scopes(self) -> frozenset[Scope]:
        """Scopes in which the budget acts; TOPK and TOPP act in every scope."""

    @property
    def context_positions(self) -> int:
        """Positions that the KV cache can hold."""

    @property
    def position(self) -> int:
        """Positions in the KV cache, and so the absolute position of the next token."""

    @property
    def selections(self) -> tuple[Selection, ...]:
        """One Selection per MoE layer of the last forward."""

    @property
    def stats(self) -> Stats:
        """A frozen snapshot."""

    def forward(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        scope: Scope,
        logits: Literal["all", "last"] = "all",
        rows: Rows = "together",
        row_votes: RowVotes = None,
    ) -> npt.NDArray[np.float32]:
        """Run one step: append `tokens` to the KV cache and score them.

        Args:
            tokens: n >= 1 token ids.
            scope: what the step is, for the budget and the statistics.
            logits: score every position, or only the last.
            rows: "together" forms one union of all positions, which the options of `scope` cut; "alone" (scope `verify` only)
                routes every position as a step of one, by the options of scope `decode`, and reads each expert once all the
                same. A position's logits are then bit for bit those that decoding it by itself would give.
            row_votes: int [n], 0 to 2^16 (a full vote): what each row's votes weigh when a union's experts are ranked. Only in
                scope `verify` with rows "together". None, as full votes throughout, lets all rows count alike.

        Returns:
            float32 [n, vocab], or [1, vocab] with `logits="last"`.

        Raises:
            TokenError: no tokens, or one outside the vocabulary.
            OptionError: `rows="alone"` in another scope, or with a policy that looks at the cache; `row_votes` elsewhere than said,
                out of range, or of more than 31 rows (`routing_spec.most_voting_rows`).
            ShapeError: `row_votes` is not one whole number per token.
            ContextOverflowError: the cache cannot hold them; nothing was appended.
        """

    def reroute(self, routing: RoutingOptions, budget_scopes: Iterable[Scope]) -> None:
        """Route steps from now on by other options; what is in the KV cache stays.

        Raises:
            OptionError: a list of budgets does not fit the model, or there is no such scope; nothing has changed.
        """

    def rewind(self, n: int) -> None:
        """Drop the last n positions.

        Raises:
            RewindError: n is negative or more than `position`.
        """

    def reset(self) -> None:
        """Drop all positions; statistics go on."""
