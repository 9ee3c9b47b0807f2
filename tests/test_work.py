"""Work counted in experts' worth: by hand for one model, and blind to the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_models import EVEN, ODD, converted, random_tokens

import colibri_jax
from colibri_jax.config import ModelConfig
from colibri_jax.generate.work import row_weights, work_meter


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("model"), ODD)


def test_row_weights_by_hand() -> None:
    """EVEN: three layers, two of them sparse, tied embeddings, no shared experts."""
    width, expert = 128, 3 * 128 * 64
    heads, rope, nope, value, q_rank, kv_rank = 2, 8, 16, 16, 64, 32
    attention = (
        q_rank * width + q_rank + heads * (nope + rope) * q_rank + (kv_rank + rope) * width + kv_rank
        + heads * (nope + value) * kv_rank + width * heads * value
    )  # fmt: skip
    indexer = 16 * 16 * q_rank + 16 * width + 2 * 16 + 16 * width
    layer, router = attention + indexer + 2 * width, 8 * width + 8
    trunk = 3 * layer + 2 * router + 3 * width * 64 + width + 96 * width
    assert row_weights(ModelConfig.from_hf(EVEN)) == (trunk / expert, 0.0)
    block = layer + router + 2 * width + 2 * width * width + width + 96 * width
    assert row_weights(ModelConfig.from_hf({**EVEN, "num_nextn_predict_layers": 1})) == (trunk / expert, block / expert)


def test_a_dense_models_unit_is_a_row() -> None:
    assert row_weights(ModelConfig.from_hf({**EVEN, "mlp_layer_types": ["dense"] * 3}))[0] == 1.0


def test_the_meter_counts_rows_and_experts_and_not_the_cache(container: Path) -> None:
    tokens = random_tokens(ODD, 9)
    readings = []
    for cache in (1, 16):
        lm: Any = colibri_jax.load(container, cache_experts=cache, mtp=True)
        meter, (trunk, block) = work_meter(lm), row_weights(lm.config)
        assert meter() == 0.0
        lm.forward(tokens[:5], scope="prefill")
        kept = sum(selection.kept.size for selection in lm.selections)
        assert meter() == kept + 5 * trunk
        lm.mtp_forward(tokens[1:6], slice(None))
        assert meter() == kept + lm.mtp_selection.kept.size + 5 * trunk + 5 * block
        lm.forward(tokens[5:], scope="verify", rows="alone")
        readings.append(meter())
    assert readings[0] == readings[1]
