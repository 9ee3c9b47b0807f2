"""The native engine's public door."""

from __future__ import annotations

from colibri_jax.engine import select_experts

__all__ = ["select_experts"]
