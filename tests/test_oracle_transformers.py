"""The goldens, made again by the installed transformers (extra `oracle`; skipped where it is not installed)."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from oracles import random_glm
from oracles.random_families import CASES

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"extra `oracle` is not installed: no {', '.join(MISSING)}"),
    # Releases of other projects deprecate at their own pace; what counts here is the numbers.
    pytest.mark.filterwarnings("ignore"),
]

GOLDENS = pathlib.Path(__file__).parent / "goldens"

# Of the largest logit: another release or processor may order float32 sums differently, as test_reference_model.py derives.
TOLERANCE = 2e-5


def check(file: str, name: str, raw: dict[str, Any], params: dict[str, np.ndarray], tokens: np.ndarray) -> None:
    from goldens import upstream

    results, _ = upstream.run(raw, params, tokens)
    with np.load(GOLDENS / file) as goldens:
        for result, fresh in results.items():
            stored = goldens[f"{name}/{result}"]
            if result == "chosen":
                np.testing.assert_array_equal(fresh, stored)
            else:
                assert fresh.shape == stored.shape
                assert np.abs(fresh - stored).max() < TOLERANCE * np.abs(stored).max(), result
        if f"{name}/shapes" in goldens:
            assert upstream.saved_shapes(raw, params) == json.loads(goldens[f"{name}/shapes"].tobytes())


@pytest.mark.parametrize("name", CASES)
def test_family_goldens_are_what_transformers_computes_today(name: str) -> None:
    case = CASES[name]
    check("families.npz", name, case.config, case.params(), case.tokens)


@pytest.mark.parametrize("case", [0, 5, 9])
def test_glm_goldens_are_what_transformers_computes_today(case: int) -> None:
    check("glm_moe_dsa.npz", str(case), random_glm.hf_config(case), random_glm.params_of(case), random_glm.tokens_of(case))
