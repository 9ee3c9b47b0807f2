"""Model configurations: frozen, validated descriptions read from a checkpoint's `config.json`.

A family is a description (which attention, which router), never a fork of a forward pass; both implementations
read nothing but these dataclasses. `layer_spec.py` has the parts, `families.py` what each family's `config.json` means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from colibri_jax.errors import ConfigError, OptionError
from colibri_jax.families import FAMILIES, read_config
from colibri_jax.layer_spec import (
    INDEXER_NORM_EPS,
    LATENT_NORM_EPS,
    AttentionConfig,
    GQAConfig,
    IndexerConfig,
    IndexerKind,
    MLAConfig,
    MoEConfig,
    QKNorm,
    RopeConfig,
    RopeLayout,
    YarnConfig,
    positive,
)
from colibri_jax.routing_spec import whole_number

__all__ = [
    "FAMILIES",
    "INDEXER_NORM_EPS",
    "LATENT_NORM_EPS",
    "AttentionConfig",
    "GQAConfig",
    "IndexerConfig",
    "IndexerKind",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "QKNorm",
    "RopeConfig",
    "RopeLayout",
    "YarnConfig",
]


# Where no context is asked for: enough for a conversation, small enough for the KV cache of the largest models.
DEFAULT_CONTEXT_POSITIONS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model, independent of where its weights are."""

    family: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_mtp_layers: int
    sparse: tuple[bool, ...]
    """Per trunk layer: True where the MLP is a mixture of experts."""
    dense_hidden: int
    attention: AttentionConfig
    indexer: IndexerConfig | None
    """Only with MLA."""
    moe: MoEConfig
    rms_eps: float
    max_positions: int
    tie_embeddings: bool

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "n_layers", "dense_hidden", "max_positions"):
            positive(field, getattr(self, field))
        if len(self.sparse) != self.n_layers:
            raise ConfigError("one MLP kind per layer", where="mlp_layer_types", expected=self.n_layers, got=len(self.sparse))
        if self.n_mtp_layers not in (0, 1):
            raise ConfigError("unsupported count", where="num_nextn_predict_layers", expected="0 or 1", got=self.n_mtp_layers)
        if self.indexer is not None:
            if not isinstance(self.attention, MLAConfig):
                raise ConfigError("an indexer reads MLA's query latent", where="attention", expected="MLA", got="GQA")
            if len(self.indexer.kinds) != self.n_layers:
                raise ConfigError("one indexer kind per layer", where="indexer_types", expected=self.n_layers, got=len(self.indexer.kinds))
            if self.indexer.head_dim < self.attention.rope_dim:
                raise ConfigError(
                    "the indexer rotates the first rope_dim of its head",
                    where="index_head_dim",
                    expected=f">= {self.attention.rope_dim}",
                    got=self.indexer.head_dim,
                )

    def resolve_context(self, asked: int | None) -> int:
        """Positions of a KV cache: as many as asked for; by default the model's own limit, at most 4096.

        Raises:
            OptionError: not a whole number, less than 1, or more than the model can compute.
        """
        if asked is None:
            return min(self.max_positions, DEFAULT_CONTEXT_POSITIONS)
        asked = whole_number(asked, "context_positions")
        if not 1 <= asked <= self.max_positions:
            raise OptionError("context out of range", where="context_positions", expected=f"1 to {self.max_positions}", got=asked)
        return asked

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Trunk layers that have a router, ascending."""
        return tuple(i for i, s in enumerate(self.sparse) if s)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dictionary of a Hugging Face `config.json`.

        Raises:
            UnsupportedFamilyError: `model_type` is not one of `FAMILIES`.
            ConfigError: a key is missing, mistyped or contradicts another.
        """
        return cls(**read_config(config))
