"""The reference: pure JAX, and the definition of routing, budget, quantised arithmetic and the model."""
