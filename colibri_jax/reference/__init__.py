"""The reference: pure JAX, and the definition of routing, budget, quantised arithmetic and the model."""

from colibri_jax.reference.model import ReferenceModel
from colibri_jax.reference.routing import select_experts

__all__ = ["ReferenceModel", "select_experts"]
