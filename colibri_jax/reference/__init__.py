"""The reference: pure JAX, and the definition of routing, budget, quantised arithmetic and the model."""

from colibri_jax.reference.model import ReferenceModel
from colibri_jax.reference.routing import select_experts
from colibri_jax.reference.rows_alone import select_rows_alone

__all__ = ["ReferenceModel", "select_experts", "select_rows_alone"]
