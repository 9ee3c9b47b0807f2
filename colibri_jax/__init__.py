"""colibri_jax: Mixture-of-Experts decoding from disk under an expert budget, computed twice to be trusted.

Importing the package loads neither jax nor the native extension; `load`, `reference` and `native` do, when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from colibri_jax.config import ModelConfig
from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Selection

if TYPE_CHECKING:
    from colibri_jax import native, reference
    from colibri_jax.load import load

__all__ = ["ModelConfig", "RouterSpec", "RoutingOptions", "Selection", "load", "native", "reference"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load":
        # The function takes the place of the submodule of the same name, so that `colibri_jax.load(path)` works.
        function = importlib.import_module("colibri_jax.load").load
        globals()["load"] = function
        return function
    if name in ("native", "reference"):
        return importlib.import_module(f"colibri_jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
