"""The whole reference model: against transformers, over split steps, in every precision, and where it must refuse."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from oracles import random_glm
from recorded import against_transformers

from colibri_jax.config import ModelConfig
from colibri_jax.errors import (
    ContextOverflowError,
    MissingTensorError,
    NonFiniteActivationError,
    NonFiniteLogitError,
    OptionError,
    RewindError,
    ShapeError,
    TokenError,
)
from colibri_jax.quant import QuantizedMatrix, quantize_int4, quantize_int8
from colibri_jax.reference import ReferenceModel
from colibri_jax.reference.layer import LayerCache
from colibri_jax.routing_spec import RoutingOptions
from colibri_jax.tensors import tensor_specs

GOLDENS = pathlib.Path(__file__).parent / "goldens" / "glm_moe_dsa.npz"

# Of the largest logit. A float32 sum of n ≤ 64 terms is off by about sqrt(n) · 2^-25 of its size; 3 to 6 layers of some six products
# each and their residual sums stay below 1e-5. Both orders of summation count, hence twice that.
TOLERANCE = 2e-5


def config_of(case: int) -> ModelConfig:
    return ModelConfig.from_hf(random_glm.hf_config(case))


def make(case: int, **options: object) -> ReferenceModel:
    options = {"context_positions": 100, **options}
    return ReferenceModel(config_of(case), options.pop("params", None) or random_glm.params_of(case), **options)


def quantise(params: dict[str, np.ndarray], config: ModelConfig, group_size: int = 16) -> dict[str, np.ndarray | QuantizedMatrix]:
    """As a converter would, by storage class."""
    makers: dict[str, Callable[[np.ndarray], np.ndarray | QuantizedMatrix]] = {
        "f32": lambda w: w,
        "int4": lambda w: quantize_int4(w, group_size),
        "int8": quantize_int8,
    }
    return {spec.role: makers[spec.storage.removesuffix("_dequant")](params[spec.role]) for spec in tensor_specs(config)}


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


# ---- against transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(random_glm.N_CASES))
def test_logits_and_chosen_experts_equal_transformers(case: int, record_property: Callable[[str, object], None]) -> None:
    # Both forms of attention, one per case: that they agree is a test of its own.
    lm = make(case, mla_form="expanded" if case % 3 == 0 else "absorbed")
    logits = lm.forward(random_glm.tokens_of(case), scope="prefill")
    with np.load(GOLDENS) as goldens:
        expected, chosen, weights = (goldens[f"{case}/{name}"] for name in ("logits", "chosen", "weights"))
    error = relative_error(logits, expected)
    record_property("error", against_transformers("glm_moe_dsa", error, TOLERANCE))
    assert error < TOLERANCE
    assert len(lm.selections) == len(chosen)
    for selection, ids, gate in zip(lm.selections, chosen, weights, strict=True):
        order = np.argsort(selection.ids, axis=1)
        np.testing.assert_array_equal(np.take_along_axis(selection.ids, order, axis=1), ids)
        np.testing.assert_allclose(np.take_along_axis(selection.weights, order, axis=1), gate, atol=TOLERANCE)


@pytest.mark.parametrize("role", ["layers.1.attn.kv_a", "layers.0.indexer.wk", "layers.2.router.bias", "layers.1.shared.up"])
def test_golden_comparison_notices_a_planted_fault(role: str) -> None:
    case = 0
    params = random_glm.params_of(case)
    params[role] = params[role].copy()
    params[role][0] += np.float32(0.5)
    logits = make(case, params=params).forward(random_glm.tokens_of(case), scope="prefill")
    with np.load(GOLDENS) as goldens:
        assert relative_error(logits, goldens[f"{case}/logits"]) > 10 * TOLERANCE


@pytest.mark.parametrize("case", [0, 2, 8])
def test_sparse_attention_acts_and_shared_layers_reuse_the_choice(case: int) -> None:
    lm, config = make(case), config_of(case)
    assert config.indexer is not None
    hidden, attended, choices = lm.embed(random_glm.tokens_of(case)), None, []
    for layer, (kind, cache) in enumerate(zip(config.indexer.kinds, lm.caches, strict=True)):
        result = lm.layer_step(layer, hidden, cache, 0, attended_TS=attended if kind == "shared" else None)
        hidden, attended = result.hidden_TD, result.attended_TS
        assert attended is not None
        choices.append(attended)
        counts = np.minimum(np.arange(len(hidden)) + 1, config.indexer.topk)
        np.testing.assert_array_equal(attended.sum(axis=1), counts)
        if kind == "shared":
            np.testing.assert_array_equal(attended, choices[layer - 1])
    assert "shared" in config.indexer.kinds


# ---- steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [2, 9])
def test_split_steps_agree_with_one_prefill(case: int) -> None:
    lm, tokens = make(case), random_glm.tokens_of(case)[:40]
    whole = lm.forward(tokens, scope="prefill")
    lm.reset()
    parts = [lm.forward(tokens[:9], scope="prefill"), lm.forward(tokens[9:24], scope="verify")]
    parts += [lm.forward(tokens[t : t + 1], scope="decode") for t in range(24, 40)]
    assert relative_error(np.concatenate(parts), whole) < TOLERANCE
    assert lm.position == 40


def test_rewound_positions_leave_no_trace() -> None:
    lm, tokens = make(1), random_glm.tokens_of(1)
    first = lm.forward(tokens[:20], scope="prefill")
    lm.forward(tokens[::-1][:13], scope="verify")
    lm.rewind(13)
    again = lm.forward(tokens[20:21], scope="decode")
    lm.reset()
    np.testing.assert_array_equal(lm.forward(tokens[:20], scope="prefill"), first)
    np.testing.assert_array_equal(lm.forward(tokens[20:21], scope="decode"), again)


def test_last_logits_are_the_last_row() -> None:
    lm, tokens = make(14), random_glm.tokens_of(14)
    every = lm.forward(tokens, scope="prefill")
    assert every.dtype == np.float32
    assert every.shape == (len(tokens), lm.config.vocab_size)
    lm.reset()
    last = lm.forward(tokens, scope="prefill", logits="last")
    assert relative_error(last, every[-1:]) < TOLERANCE
    assert lm.hidden.shape == (len(tokens), lm.config.hidden_size)


def test_context_can_be_filled_to_its_last_position() -> None:
    lm = make(14, context_positions=21)
    tokens = random_glm.tokens_of(14)
    whole = lm.forward(tokens, scope="prefill")
    lm.rewind(1)
    assert relative_error(lm.forward(tokens[-1:], scope="decode"), whole[-1:]) < TOLERANCE
    with pytest.raises(ContextOverflowError):
        lm.forward(tokens[:1], scope="decode")
    assert lm.position == 21


def test_a_layer_computed_alone_reproduces_the_step() -> None:
    lm, tokens = make(2), random_glm.tokens_of(2)[:30]
    lm.forward(tokens[:22], scope="prefill")
    before = lm.caches
    lm.forward(tokens[22:], scope="verify")
    hidden, attended, moe_index = lm.embed(tokens[22:]), None, 0
    for layer, cache in enumerate(before):
        shares = lm.config.indexer.kinds[layer] == "shared"
        exact = LayerCache(*(None if part is None else np.asarray(part)[:22] for part in cache))
        free = lm.layer_step(layer, hidden, exact, 22, attended_TS=attended if shares else None)
        selection = lm.selections[moe_index] if lm.config.sparse[layer] else None
        fed = lm.layer_step(layer, hidden, exact, 22, attended_TS=free.attended_TS, selection=selection)
        np.testing.assert_array_equal(free.hidden_TD, fed.hidden_TD)
        np.testing.assert_array_equal(np.asarray(fed.cache.kv_SC)[:30], np.asarray(lm.caches[layer].kv_SC)[:30])
        moe_index += lm.config.sparse[layer]
        hidden, attended = free.hidden_TD, free.attended_TS
    assert lm.position == 30


def test_kept_experts_alone_give_the_same_step() -> None:
    tokens = random_glm.tokens_of(0)[:11]
    everything, kept = (
        make(0, expert_residency=residency, routing=RoutingOptions(budget=5), budget_scopes=("prefill",)) for residency in ("all", "kept")
    )
    assert relative_error(kept.forward(tokens, scope="prefill"), everything.forward(tokens, scope="prefill")) < TOLERANCE
    for mine, theirs in zip(kept.selections, everything.selections, strict=True):
        np.testing.assert_array_equal(mine.kept, theirs.kept)
        assert mine.kept.size == 5


# ---- budget and statistics --------------------------------------------------------------------------------------


def test_budget_acts_in_its_scopes_only_and_topk_in_all() -> None:
    tokens = random_glm.tokens_of(0)[:16]
    lm = make(0, routing=RoutingOptions(budget=4, expert_topk=2), budget_scopes=("verify",))
    lm.forward(tokens, scope="prefill")
    assert all(selection.dropped == 0 and selection.kept.size > 4 for selection in lm.selections)
    assert all((selection.ids >= 0).sum(axis=1).max() == 2 for selection in lm.selections)
    lm.rewind(16)
    lm.forward(tokens, scope="verify")
    assert all(selection.kept.size == 4 for selection in lm.selections)
    counted = lm.stats.scopes["verify"]
    assert (counted.steps, counted.positions, counted.layer_steps, counted.budget_acted_layer_steps) == (1, 16, 2, 2)
    assert counted.dropped_experts == sum(selection.dropped for selection in lm.selections)
    assert lm.stats.scopes["prefill"].dropped_experts == 0
    assert counted.wall_seconds > 0
    assert lm.stats.backend == "reference"


def test_one_budget_per_moe_layer() -> None:
    lm = make(0, routing=RoutingOptions(budget=(3, 6)), budget_scopes=("prefill",))
    lm.forward(random_glm.tokens_of(0), scope="prefill")
    assert [selection.kept.size for selection in lm.selections] == [3, 6]
    with pytest.raises(OptionError, match="budget"):
        make(0, routing=RoutingOptions(budget=(3, 6, 6)))


# ---- precisions -------------------------------------------------------------------------------------------------


def test_dequantised_precisions_equal_full_precision_on_dequantised_weights() -> None:
    config, tokens = config_of(3), random_glm.tokens_of(3)[:16]
    stored = quantise(random_glm.params_of(3), config)
    plain = {role: value.dequantize() if isinstance(value, QuantizedMatrix) else value for role, value in stored.items()}
    expected = make(3, params=plain).forward(tokens, scope="prefill")
    for precision in ("full", "w4a32"):
        np.testing.assert_array_equal(make(3, params=stored, precision=precision).forward(tokens, scope="prefill"), expected)


def test_quantised_activations_change_logits_a_little() -> None:
    """int8 activations are off by up to half of 1/127 of a group's largest value; over the layers that is per cents, not tens of them."""
    tokens = random_glm.tokens_of(5)[:16]
    stored = quantise(random_glm.params_of(5), config_of(5))
    a8, a32 = (make(5, params=stored, precision=precision) for precision in ("w4a8", "w4a32"))
    exact, quantised = a32.forward(tokens, scope="prefill"), a8.forward(tokens, scope="prefill")
    assert 1e-4 < np.linalg.norm(quantised - exact) / np.linalg.norm(exact) < 0.1
    drafts = [lm.mtp_forward(tokens[1:], a32.hidden[:-1]) for lm in (a8, a32)]
    assert 1e-4 < np.linalg.norm(drafts[0] - drafts[1]) / np.linalg.norm(drafts[1]) < 0.1
    assert a8.stats.precision == "w4a8"


def test_quantised_precision_refuses_float_weights() -> None:
    with pytest.raises(OptionError, match="quantised weights"):
        make(0, precision="w4a8")


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[], [-1], [97], [3, 97], [0.5], [[1]]])
def test_bad_tokens_are_refused(tokens: list[object]) -> None:
    lm = make(0)
    with pytest.raises(TokenError):
        lm.forward(tokens, scope="prefill")
    assert lm.position == 0


def test_overflow_and_rewind_leave_the_model_as_it_was() -> None:
    lm, tokens = make(0, context_positions=16), random_glm.tokens_of(0)
    lm.forward(tokens[:10], scope="prefill")
    expected = make(0, context_positions=16)
    expected.forward(tokens[:10], scope="prefill")
    with pytest.raises(ContextOverflowError):
        lm.forward(tokens[:7], scope="prefill")
    for n in (-1, 11):
        with pytest.raises(RewindError):
            lm.rewind(n)
    assert lm.position == 10
    np.testing.assert_array_equal(lm.forward([5], scope="decode"), expected.forward([5], scope="decode"))


@pytest.mark.parametrize(
    ("role", "error", "where"),
    [
        ("layers.1.attn_norm", NonFiniteActivationError, "layer 1, attention"),
        ("layers.2.mlp_norm", NonFiniteLogitError, "layer 2"),
        ("layers.0.mlp.down", NonFiniteActivationError, "layer 0, MLP"),
        ("final_norm", NonFiniteActivationError, "head"),
    ],
)
def test_non_finite_values_are_refused_naming_the_layer(role: str, error: type[Exception], where: str) -> None:
    params = random_glm.params_of(0)
    params[role] = params[role].copy()
    params[role].flat[0] = np.inf
    lm = make(0, params=params)
    with pytest.raises(error, match=where):
        lm.forward([1, 2, 3], scope="prefill")
    assert lm.position == 0
    assert lm.selections == ()


def test_options_outside_their_domain_are_refused() -> None:
    for options in (
        {"precision": "half"},
        {"mla_form": "folded"},
        {"budget_scopes": ("draft",)},
        {"context_positions": 0},
        {"context_positions": 257},
    ):
        with pytest.raises(OptionError):
            make(0, **options)
    with pytest.raises(OptionError, match="scope"):
        make(0).forward([1], scope="draft")


def test_missing_and_misshapen_weights_are_named() -> None:
    params = random_glm.params_of(0)
    with pytest.raises(MissingTensorError, match=r"layers\.2\.experts\.7\.up"):
        make(0, params={role: value for role, value in params.items() if role != "layers.2.experts.7.up"})
    with pytest.raises(ShapeError, match=r"layers\.0\.attn\.o"):
        make(0, params={**params, "layers.0.attn.o": params["layers.0.attn.o"].T})


def test_layer_step_checks_what_it_is_fed() -> None:
    lm = make(2)
    hidden = lm.embed(np.arange(4))
    with pytest.raises(ShapeError, match="hidden"):
        lm.layer_step(0, hidden[:, 1:], lm.caches[0], 0)
    with pytest.raises(ShapeError, match="cache"):
        lm.layer_step(0, hidden, LayerCache(*(np.zeros((2, 19), np.float32), np.zeros((2, 17), np.float32))), 3)
    with pytest.raises(ShapeError, match="attended_TS"):
        lm.layer_step(2, hidden, lm.caches[2], 0)
    with pytest.raises(ShapeError, match="attended_TS"):
        lm.layer_step(2, hidden, lm.caches[2], 0, attended_TS=np.ones((4, 5), bool))
    lm.forward(np.arange(3), scope="prefill")
    with pytest.raises(ShapeError, match="selection"):
        lm.layer_step(4, hidden, lm.caches[4], 0, selection=lm.selections[0])
