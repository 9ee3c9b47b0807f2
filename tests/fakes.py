"""A LanguageModel without weights: its logits are a pure function of the tokens so far, its statistics are made up and exact."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from colibri_jax.config import ModelConfig
from colibri_jax.errors import ContextOverflowError, TokenError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.routing_spec import RoutingOptions, Rows, RowVotes, Scope, Selection, check_step
from colibri_jax.stats import ScopeStats, Stats

# A Hugging Face configuration small enough to read at a glance; top 8 of 64 experts.
HF_CONFIG: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "max_position_embeddings": 128,
    "first_k_dense_replace": 1,
    "index_topk": 64,
    "index_head_dim": 8,
    "index_n_heads": 16,
    "eos_token_id": 0,
}

SPECIAL_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# One step of a scope with a budget: figures are chosen so that every derived value has a short decimal form.
STEP_STATS: dict[Scope, ScopeStats] = {
    "prefill": ScopeStats(
        wall_seconds=1.0,
        disk_wait_seconds=0.5,
        experts_seconds=0.25,
        attention_seconds=0.125,
        head_seconds=0.0625,
        other_seconds=0.0625,
        bytes_read=3_000_000_000,
        useful_bytes=2_900_000_000,
        cache_hits=10,
        cache_misses=30,
        layer_steps=2,
        union_experts=40,
        kept_experts=40,
        mass_kept_sum=2.0,
    ),
    "decode": ScopeStats(
        wall_seconds=0.5,
        disk_wait_seconds=0.25,
        experts_seconds=0.125,
        attention_seconds=0.0625,
        head_seconds=0.03125,
        other_seconds=0.03125,
        bytes_read=80_000_000,
        useful_bytes=79_000_000,
        cache_hits=2,
        cache_misses=6,
        layer_steps=2,
        budget_acted_layer_steps=2,
        union_experts=16,
        kept_experts=8,
        dropped_experts=8,
        dropped_slots=8,
        emptied_positions=1,
        mass_kept_sum=1.5,
        avoided_read_bytes_estimate=160_000_000,
    ),
}
STEP_STATS["verify"] = STEP_STATS["decode"]


@dataclasses.dataclass
class Call:
    """One forward call as it was made."""

    n: int
    scope: Scope
    logits: str


class FakeModel:
    """Follows a script greedily, or (without one) scores tokens by a hash of everything before them.

    Args:
        script: tokens whose logits win, by absolute position; a position outside has token 0 win.
        interrupt_at: index of the forward call that Ctrl-C hits.
    """

    def __init__(
        self,
        *,
        config: ModelConfig | None = None,
        context_positions: int = 128,
        script: dict[int, int] | None = None,
        interrupt_at: int | None = None,
        routing: RoutingOptions | None = None,
        budget_scopes: frozenset[Scope] = frozenset({"decode"}),
    ) -> None:
        self.config = config or ModelConfig.from_hf(HF_CONFIG)
        self.context_positions = context_positions
        self.routing = routing or RoutingOptions()
        self.budget_scopes = budget_scopes
        self.selections: tuple[Selection, ...] = ()
        self.calls: list[Call] = []
        self._script, self._interrupt_at = script, interrupt_at
        self._tokens: list[int] = []
        self._stats = Stats(backend="native", precision="w4a8", isa="scalar", reader="direct", threads=2, cache_experts_per_layer=8)

    @property
    def position(self) -> int:
        return len(self._tokens)

    @property
    def stats(self) -> Stats:
        return self._stats

    def forward(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        scope: Scope,
        logits: Literal["all", "last"] = "all",
        rows: Rows = "together",
        row_votes: RowVotes = None,
    ) -> npt.NDArray[np.float32]:
        check_step(scope, logits, rows, self.routing, row_votes)
        if len(self.calls) == self._interrupt_at:
            raise KeyboardInterrupt
        new = [int(t) for t in tokens]
        if not new or not all(0 <= t < self.config.vocab_size for t in new):
            raise TokenError("bad tokens", got=new)
        if self.position + len(new) > self.context_positions:
            raise ContextOverflowError("no room", got=len(new))
        self.calls.append(Call(len(new), scope, logits))
        rows = []
        for token in new:
            self._tokens.append(token)
            rows.append(self._score())
        step = dataclasses.replace(STEP_STATS[scope], steps=1, positions=len(new))
        self._stats = dataclasses.replace(self._stats, scopes={**self._stats.scopes, scope: self._stats.scopes[scope].plus(step)})
        return np.stack(rows[-1:] if logits == "last" else rows)

    def reroute(self, routing: RoutingOptions, budget_scopes: Iterable[Scope]) -> None:
        self.routing, self.budget_scopes = routing, frozenset(budget_scopes)

    def rewind(self, n: int) -> None:
        del self._tokens[len(self._tokens) - n :]

    def reset(self) -> None:
        self._tokens.clear()

    def _score(self) -> npt.NDArray[np.float32]:
        if self._script is not None:
            row = np.zeros(self.config.vocab_size, np.float32)
            row[self._script.get(self.position, 0)] = 100.0
            return row
        return np.random.default_rng(self._tokens).standard_normal(self.config.vocab_size).astype(np.float32)


def as_language_model(model: FakeModel) -> LanguageModel:
    """The same object, for a type checker to compare with the protocol."""
    return model


def byte_tokenizer(*, merges: Sequence[tuple[str, str]] = (), extra: Sequence[AddedToken] = ()) -> Tokenizer:
    """A byte-level BPE tokenizer: the role markers, then 256 byte tokens, then one token per merge, then `extra`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*SPECIAL_TOKENS, *alphabet])}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens(list(extra))
    return tokenizer


def write_model_directory(path: Path, **config: Any) -> Path:
    """Everything of a model directory that is not weights."""
    path.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({**HF_CONFIG, **config}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 4]}))
    return path
