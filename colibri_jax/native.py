"""The native engine's public door."""

from __future__ import annotations

from colibri_jax.engine import select_experts
from colibri_jax.engine.routing import select_rows_alone

__all__ = ["select_experts", "select_rows_alone"]
