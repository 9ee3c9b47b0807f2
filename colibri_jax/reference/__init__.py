"""The reference: pure JAX functions that define routing, budget and the model. Knows nothing of the native engine."""

from __future__ import annotations

from colibri_jax.reference.routing import select_experts

__all__ = ["select_experts"]
