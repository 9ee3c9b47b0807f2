"""A fixture that files share, and hypothesis profiles.

"ci" repeats the same cases every time, "explore" looks for new ones (HYPOTHESIS_PROFILE=explore).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Compiling a program for a new shape takes longer than any deadline that would mean something.
settings.register_profile("ci", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("ci"), derandomize=False, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`model_strategies.Models`, empty; imported here, because most files need neither jax nor the extension."""
    from model_strategies import Models

    return Models(tmp_path_factory.mktemp("models"))
