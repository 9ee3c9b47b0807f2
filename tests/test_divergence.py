"""What lossy verification is measured by: the exact run over the written text, and nothing where nothing was cut."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from engine_models import ODD, converted, random_tokens
from speculation_checks import Forced, decode_plainly

import colibri_jax
from colibri_jax.cli import main
from colibri_jax.errors import OptionError
from colibri_jax.generate.divergence import Divergence, divergence
from colibri_jax.generate.loop import GenerateOptions, Generation, generate
from colibri_jax.generate.sampling import SamplingOptions
from colibri_jax.generate.speculate import SpeculationOptions, Speculator
from colibri_jax.logits import kl_divergence, log_softmax
from colibri_jax.routing_spec import RoutingOptions

Written = tuple[Any, Generation, dict[int, npt.NDArray[np.float32]], GenerateOptions]


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("model"), ODD)


def write(container: Path, budget: int, temperature: float = 0.0) -> Written:
    """An answer of union speculation with drafts that exact decoding would agree with."""
    common: dict[str, Any] = {"routing": RoutingOptions(budget=budget), "budget_scopes": ("verify",), "context_positions": 100}
    options = GenerateOptions(max_new_tokens=50, sampling=SamplingOptions(temperature=temperature, seed=5))
    prompt = random_tokens(ODD, 6)
    plain = decode_plainly(colibri_jax.load(container, cache_experts=2, **common), prompt, options)
    lm: Any = colibri_jax.load(container, cache_experts=2, **common)
    chosen_from: dict[int, npt.NDArray[np.float32]] = {}
    speculation = SpeculationOptions(depth=3, speculation="union", pausing=False)
    speculator = Speculator(lm, Forced(plain.answer, 0, ODD["vocab_size"]), speculation, on_logits=chosen_from.__setitem__)
    return lm, generate(lm, prompt, options, make=speculator.tokens), chosen_from, options


def measure(written: Written, **changed: Any) -> Divergence:
    lm, answer, chosen_from, options = written
    given: dict[str, Any] = {"first": answer.prompt_tokens, "tokens": answer.tokens, "chosen_from": chosen_from, **changed}
    found = divergence(lm, sampling=options.sampling, **given)
    assert found is not None
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_found_where_nothing_is_cut(temperature: float, container: Path) -> None:
    none = Divergence(tokens=49, kld_mean=0.0, kld_max=0.0, same_top=1.0, other_choices=0, first_other=None)
    assert measure(write(container, 0, temperature)) == none


def test_cuts_are_measured_as_single_steps_would(container: Path) -> None:
    written = write(container, 3)
    lm, answer, chosen_from, _ = written
    found = measure(written)
    lm.rewind(lm.position - answer.prompt_tokens)
    lm.reroute(RoutingOptions(), ())
    kld, others, same = [], [], 0
    for i, token in enumerate(answer.tokens[:-1]):
        exact = lm.forward([token], scope="decode")[0]
        other = chosen_from[answer.prompt_tokens + i + 1]
        kld.append(float(kl_divergence(log_softmax(exact[None]), log_softmax(other[None]))[0]))
        same += int(exact.argmax() == other.argmax())
        others += [i + 1] * (int(exact.argmax()) != answer.tokens[i + 1])
    assert found.kld_mean > 0.0
    assert found == Divergence(
        tokens=49, kld_mean=float(np.mean(kld)), kld_max=max(kld), same_top=same / 49, other_choices=len(others), first_other=others[0]
    )


def test_logits_of_the_neighbouring_position_are_seen(container: Path) -> None:
    written = write(container, 0)
    shifted = {position + 1: row for position, row in written[2].items()}
    shifted[min(written[2])] = written[2][min(written[2])]
    assert measure(written, chosen_from=shifted).kld_mean > 0.01


def test_a_cache_without_the_prompt_is_refused(container: Path) -> None:
    written = write(container, 0)
    written[0].rewind(written[0].position - 5)
    with pytest.raises(OptionError, match="does not hold the prompt"):
        measure(written)
    assert divergence(written[0], 0, written[1].tokens[:1], {}, SamplingOptions()) is None


def test_the_command_prints_it_on_request() -> None:
    flags = ["--prompt", "Define recursion.", "--draft", "lookup", "--budget", "8", "--max-new-tokens", "12", "--json"]
    union = [*flags, "--speculation", "union", "--budget-scope", "verify"]
    result = CliRunner().invoke(main, ["generate", *union, "--divergence"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    assert set(printed["divergence"]) == {field.name for field in dataclasses.fields(Divergence)}
    assert printed["divergence"]["tokens"] == len(printed["token_ids"]) + (printed["stop_token"] is not None) - 1
    assert "divergence from exact decoding over" in result.stderr
    assert printed["scopes"]["verify"]["positions"] < 12 * 4  # the second pass is not counted
    assert json.loads(CliRunner().invoke(main, ["generate", *union]).stdout.splitlines()[-1])["divergence"] is None
    refused = CliRunner().invoke(main, ["generate", *flags, "--divergence"])
    assert refused.exit_code != 0
    assert "strays" in refused.stderr
