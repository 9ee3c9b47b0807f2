"""Reference and native side by side: the four comparisons of an exactness claim, on any container.

(i) selections on equal router logits, equal in every field; (ii) layer by layer on equal inputs; (iii) the whole model
with float32 activations; (iv) the whole model as shipped.
"""

from colibri_jax.compare.report import CompareReport
from colibri_jax.compare.run import CompareOptions, compare

__all__ = ["CompareOptions", "CompareReport", "compare"]
