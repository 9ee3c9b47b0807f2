"""The native engine's Python side. Public names are in `colibri_jax.native`."""

from __future__ import annotations

from colibri_jax.engine.routing import select_experts

__all__ = ["select_experts"]
