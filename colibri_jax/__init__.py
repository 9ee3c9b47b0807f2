"""colibri_jax: Mixture-of-Experts decoding from disk under an expert budget, computed twice to be trusted.

Importing the package loads neither jax nor the native extension; `reference` and `native` do when they are used, and `load` loads
the one that it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from colibri_jax.config import ModelConfig
from colibri_jax.load import load  # at once: a later first import of the submodule would put the module in the function's place
from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Selection

if TYPE_CHECKING:
    from colibri_jax import native, reference

__all__ = ["ModelConfig", "RouterSpec", "RoutingOptions", "Selection", "load", "native", "reference"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("native", "reference"):
        return importlib.import_module(f"colibri_jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
