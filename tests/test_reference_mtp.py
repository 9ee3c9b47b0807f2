"""The MTP block against transformers' parts, and its cache."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from oracles import random_glm

from colibri_jax.config import ModelConfig
from colibri_jax.errors import ConfigError, RewindError, ShapeError, TokenError
from colibri_jax.reference import ReferenceModel
from colibri_jax.routing_spec import RoutingOptions, Scope

GOLDENS = pathlib.Path(__file__).parent / "goldens" / "glm_moe_dsa.npz"
TOLERANCE = 2e-5  # of the largest logit, as for the trunk
CASES = [case for case in range(random_glm.N_CASES) if random_glm.hf_config(case)["num_nextn_predict_layers"]]


def make(case: int) -> ReferenceModel:
    return ReferenceModel(ModelConfig.from_hf(random_glm.hf_config(case)), random_glm.params_of(case), context_positions=100)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_teacher_forced_logits_equal_transformers(case: int) -> None:
    lm, tokens = make(case), random_glm.tokens_of(case)
    lm.forward(tokens, scope="prefill")
    with np.load(GOLDENS) as goldens:
        expected = goldens[f"{case}/mtp_logits"]
    trunk = lm.hidden
    got = lm.mtp_forward(tokens[1:], trunk[:-1])
    assert relative_error(got, expected) < TOLERANCE
    # The comparison notices a hidden state or a token that is one row off.
    lm.mtp_rewind(lm.mtp_position)
    assert relative_error(lm.mtp_forward(tokens[1:], trunk[1:]), expected) > 100 * TOLERANCE
    lm.mtp_rewind(lm.mtp_position)
    assert relative_error(lm.mtp_forward(tokens[:-1], trunk[:-1]), expected) > 100 * TOLERANCE


def test_rows_one_by_one_give_the_logits_of_one_call() -> None:
    case = CASES[0]
    lm, tokens = make(case), random_glm.tokens_of(case)[:20]
    lm.forward(tokens, scope="prefill")
    trunk = lm.hidden
    at_once = lm.mtp_forward(tokens[1:], trunk[:-1])
    lm.mtp_rewind(9)
    assert lm.mtp_position == 10
    rest = np.concatenate([lm.mtp_forward(tokens[t + 1 : t + 2], trunk[t : t + 1]) for t in range(10, 19)])
    assert relative_error(rest, at_once[10:]) < TOLERANCE


def test_trunk_rewind_takes_later_mtp_rows_along() -> None:
    lm, tokens = make(CASES[0]), random_glm.tokens_of(CASES[0])[:8]
    lm.forward(tokens, scope="prefill")
    lm.mtp_forward(tokens[1:], lm.hidden[:-1])
    lm.rewind(1)
    assert (lm.position, lm.mtp_position) == (7, 7)
    lm.rewind(3)
    assert (lm.position, lm.mtp_position) == (4, 4)
    lm.reset()
    assert (lm.position, lm.mtp_position) == (0, 0)


def test_bad_calls_are_named_and_append_nothing() -> None:
    lm, tokens = make(CASES[0]), random_glm.tokens_of(CASES[0])[:4]
    lm.forward(tokens, scope="prefill")
    with pytest.raises(ShapeError, match="trunk hidden"):
        lm.mtp_forward(tokens, lm.hidden[:-1])
    with pytest.raises(TokenError):
        lm.mtp_forward([lm.config.vocab_size], lm.hidden[:1])
    with pytest.raises(RewindError):
        lm.mtp_rewind(1)
    assert lm.mtp_position == 0
    without = ReferenceModel(ModelConfig.from_hf(random_glm.hf_config(14)), random_glm.params_of(14))
    with pytest.raises(ConfigError, match="MTP"):
        without.mtp_forward([1], np.zeros((1, 37), np.float32))


def test_the_block_is_routed_by_the_options_of_decoding() -> None:
    case = CASES[0]
    config, params, tokens = ModelConfig.from_hf(random_glm.hf_config(case)), random_glm.params_of(case), random_glm.tokens_of(case)[:16]
    trunk = np.random.default_rng(0).normal(size=(16, config.hidden_size)).astype(np.float32)

    def drafts(routing: RoutingOptions, *scopes: Scope) -> np.ndarray:
        lm = ReferenceModel(config, params, context_positions=100, routing=routing, budget_scopes=scopes)
        return lm.mtp_forward(tokens, trunk)

    plain, topk = drafts(RoutingOptions()), drafts(RoutingOptions(expert_topk=1))
    np.testing.assert_array_equal(drafts(RoutingOptions(budget=1), "prefill", "verify"), plain)
    np.testing.assert_array_equal(drafts(RoutingOptions(policy="coverage", coverage=0.1), "prefill", "verify"), plain)
    assert relative_error(topk, plain) > 100 * TOLERANCE
    # Each row is a step of its own, so that a budget of one leaves every row its best, which is what the least TOPP leaves.
    np.testing.assert_array_equal(drafts(RoutingOptions(budget=1), "decode"), drafts(RoutingOptions(expert_topp=1e-9)))
