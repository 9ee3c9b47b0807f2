"""Profiles of sensitivity: the list that is chosen, the file, and both ends of the command line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from fakes import HF_CONFIG

from colibri_jax.cli import main
from colibri_jax.cli.budgets import ProfileShare, parse_budgets, parse_one_of_several
from colibri_jax.cli.options import SHIPPED_MODEL, show_value
from colibri_jax.config import ModelConfig
from colibri_jax.container.reader import Container
from colibri_jax.errors import ColibriError, MissingProfileError, OptionError, ProfileFileError, ProfileModelError
from colibri_jax.quality import profile as module
from colibri_jax.quality.profile import LayerCut, LayerSensitivity, Sensitivity, best, choose, frontier, layer_settings
from colibri_jax.quality.profile_file import PROFILE_FILE, find_profile, read_profiles, write_profile
from colibri_jax.quality.steps import StepShape
from colibri_jax.quality.store import container_fingerprint, model_fingerprint
from colibri_jax.routing_spec import RoutingOptions

CONFIG = ModelConfig.from_hf(HF_CONFIG)  # two MoE layers, top 8 of 64
DECODE, VERIFY = StepShape(kind="decode"), StepShape(kind="verify")
SHARES = (0.3, 0.45, 0.5, 0.55, 0.65, 0.75, 0.9, 0.95, 1.0)
TEXT = """A budget is a plan for spending. In a household it sets what comes in against what goes out; in an engine it limits how much
may be read from the disk at each step. The river rises in the mountains, runs through three lakes and reaches the sea."""


def sensitivity(layers: tuple[LayerSensitivity, ...], **fields: Any) -> Sensitivity:
    given: dict[str, Any] = {"model": "m", "shape": DECODE, "rule": RoutingOptions(), "backend": "native", "precision": "w4a8"}
    given |= {"text": ("t.txt",), "window": 16, "windows": 3, "tokens": 36, "steps": 36}
    return Sensitivity(**given | fields, layers=layers)


def tables(seed: int) -> Sensitivity:
    """Layers of different sizes and losses, some of which are equal or fall with less kept, as measured ones do."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    equal = bool(rng.integers(2))
    layers = []
    for index in range(count):
        budgets = sorted(rng.choice(np.arange(1, 8), size=int(rng.integers(1, 5)), replace=False).tolist())
        kept = budgets if equal else sorted(rng.integers(1, 40, len(budgets)).tolist())
        kld = np.round(np.sort(rng.random(len(budgets)))[::-1], 1 if seed % 2 else 6)
        if seed % 3 == 0:
            rng.shuffle(kld)
        cuts = tuple(LayerCut(budget=n, kld=float(loss), kld_error=0.1, kept=36 * k) for n, loss, k in zip(budgets, kld, kept, strict=True))
        size = 100 if equal else int(rng.integers(50, 200))
        layers.append(LayerSensitivity(layer=index + 1, expert_bytes=size, distinct=36 * (8 if equal else 40), cuts=cuts))
    return sensitivity(tuple(layers))


def brute_force(profile: Sensitivity, share: float) -> tuple[float, int] | None:
    """The least KLD of all lists within a share, and the fewest bytes that have it, by trying them all."""
    options = [
        [(layer.distinct * layer.expert_bytes, 0.0), *((cut.kept * layer.expert_bytes, cut.kld) for cut in layer.cuts)]
        for layer in profile.layers
    ]
    whole = sum(layer[0][0] for layer in options)
    found = []
    for picks in itertools.product(*options):
        nbytes = sum(pick[0] for pick in picks)
        if Fraction(nbytes, whole) <= Fraction(str(share)):
            found.append((sum((pick[1] for pick in picks), 0.0), nbytes))
    return min(found, default=None)


def figures(profile: Sensitivity, budgets: tuple[int, ...]) -> tuple[float, int]:
    """KLD and bytes of a list, looked up in the table."""
    kld, nbytes = 0.0, 0
    for layer, budget in zip(profile.layers, budgets, strict=True):
        cut = {cut.budget: cut for cut in layer.cuts}.get(budget)
        kld += 0.0 if cut is None else cut.kld
        nbytes += (layer.distinct if cut is None else cut.kept) * layer.expert_bytes
    return kld, nbytes


def mistakes(profile: Sensitivity, chooser: Callable[[Sensitivity, float], tuple[int, ...]]) -> list[str]:
    """Every share for which the list is not the best, or there is one where there should be none."""
    wrong = []
    for share in SHARES:
        expected = brute_force(profile, share)
        try:
            got = figures(profile, chooser(profile, share))
        except OptionError:
            got = None
        if got != expected:
            wrong.append(f"{share}: {got} for {expected}")
    return wrong


# ---- choosing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_the_list_is_the_best_of_all(seed: int) -> None:
    assert mistakes(tables(seed), choose) == []


def reversed_layers(profile: Sensitivity, share: float) -> tuple[int, ...]:
    return choose(profile, share)[::-1]


def neighbours_kept(profile: Sensitivity, share: float) -> tuple[int, ...]:
    layers = tuple(
        dataclasses.replace(
            layer,
            cuts=tuple(
                dataclasses.replace(cut, kept=other.kept) for cut, other in zip(layer.cuts, (*layer.cuts[1:], layer.cuts[-1]), strict=True)
            ),
        )
        for layer in profile.layers
    )
    return choose(dataclasses.replace(profile, layers=layers), share)


def no_share(profile: Sensitivity, share: float) -> tuple[int, ...]:
    return choose(profile, 1.0)


def first_fit(profile: Sensitivity, share: float) -> tuple[int, ...]:
    """Cut the later layers first, as far as need be."""
    return next(point.budgets for point in sorted(frontier(profile), key=lambda p: p.budgets) if point.share <= share)


@pytest.mark.parametrize("fault", [reversed_layers, neighbours_kept, no_share, first_fit])
def test_planted_fault_is_found(fault: Callable[[Sensitivity, float], tuple[int, ...]]) -> None:
    found = 0
    for seed in range(40):
        try:
            found += bool(mistakes(tables(seed), fault))
        except (StopIteration, KeyError, ValueError):
            found += 1
    assert found >= 20


@pytest.mark.parametrize("seed", range(10))
def test_a_larger_share_never_costs_more(seed: int) -> None:
    profile = tables(seed)
    shares = np.linspace(frontier(profile)[0].share + 1e-9, 1.0, 60)
    points = [best(profile, float(share)) for share in shares]
    for less, more in itertools.pairwise(points):
        assert more.kld <= less.kld
        assert more.nbytes >= less.nbytes
    assert points[-1].kld == 0.0 or any(cut.kld == 0.0 for layer in profile.layers for cut in layer.cuts)


def test_shares_are_what_is_written() -> None:
    # 0.35 as a double is less than 35 %, and 14 of 40 would not fit.
    cut = tuple(LayerCut(budget=n, kld=1.0 / n, kld_error=0.0, kept=n) for n in (2, 3))
    layers = tuple(LayerSensitivity(layer=i, expert_bytes=1, distinct=8, cuts=cut) for i in range(5))
    assert best(sensitivity(layers), 0.35).nbytes == 14


def test_of_equal_lists_the_first_layers_get_less() -> None:
    cut = (LayerCut(budget=4, kld=0.5, kld_error=0.0, kept=4),)
    layers = tuple(LayerSensitivity(layer=i, expert_bytes=1, distinct=8, cuts=cut) for i in range(4))
    assert choose(sensitivity(layers), 0.75) == (4, 4, 0, 0)


def test_many_layers_are_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    layers = []
    for index in range(40):
        kept = sorted(rng.choice(np.arange(1000, 9000), 6, replace=False).tolist())
        loss = np.sort(rng.random(6))[::-1]
        cuts = tuple(
            LayerCut(budget=n, kld=float(k), kld_error=0.0, kept=int(e))
            for n, k, e in zip((8, 12, 16, 20, 24, 28), loss, kept, strict=True)
        )
        layers.append(LayerSensitivity(layer=index, expert_bytes=10**7, distinct=9000, cuts=cuts))
    profile = sensitivity(tuple(layers))
    monkeypatch.setattr(module, "MOST_POINTS", 2**12)
    coarse = best(profile, 0.65)
    monkeypatch.setattr(module, "MOST_POINTS", 2**13)
    fine = best(profile, 0.65)
    assert coarse.share <= 0.65
    assert fine.kld <= coarse.kld < 1.01 * fine.kld
    assert figures(profile, fine.budgets)[1] == fine.nbytes


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan"), 0.01])
def test_shares_that_no_list_has_are_refused(share: float) -> None:
    with pytest.raises(OptionError, match="share"):
        choose(tables(1), share)


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_every_layer_is_cut_alone() -> None:
    settings = layer_settings(DECODE, RoutingOptions(denominator="frozen"), (6, 4), CONFIG)
    assert [setting.routing.budget for setting in settings] == [(4, 0), (6, 0), (0, 4), (0, 6)]
    assert {setting.routing.denominator for setting in settings} == {"frozen"}


@pytest.mark.parametrize(
    ("shape", "routing", "budgets"),
    [
        (DECODE, RoutingOptions(), (4, 8)),
        (DECODE, RoutingOptions(), (0, 4)),
        (DECODE, RoutingOptions(), ()),
        (DECODE, RoutingOptions(policy="resident", allow_irreproducible=True), (4,)),
        (DECODE, RoutingOptions(policy="coverage", coverage=0.9), (4,)),
        (DECODE, RoutingOptions(expert_topk=6), (4,)),
        (StepShape(kind="all"), RoutingOptions(), (4,)),
    ],
)
def test_what_is_no_cut_of_one_layer_is_refused(shape: StepShape, routing: RoutingOptions, budgets: tuple[int, ...]) -> None:
    with pytest.raises(OptionError):
        layer_settings(shape, routing, budgets, CONFIG)


# ---- the file -------------------------------------------------------------------------------------------------------


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / PROFILE_FILE
    one = tables(4)
    other = dataclasses.replace(one, shape=VERIFY, rule=RoutingOptions(policy="floor", floor=2, denominator="frozen"))
    assert read_profiles(file, "m") == ()
    write_profile(file, one)
    write_profile(file, other)
    assert read_profiles(file, "m") == (one, other)
    newer = dataclasses.replace(one, tokens=99)
    write_profile(file, newer)
    assert read_profiles(file, "m") == (other, newer)
    assert [path.name for path in tmp_path.iterdir()] == [PROFILE_FILE]


def test_a_profile_is_of_its_model_steps_and_rule(tmp_path: Path) -> None:
    file = tmp_path / PROFILE_FILE
    one = tables(4)
    write_profile(file, one)
    assert find_profile(file, "m", StepShape(kind="decode", prefix=9), RoutingOptions(budget=3, floor=2)) == one
    assert find_profile(file, "m", DECODE, None) == one
    with pytest.raises(ProfileModelError):
        find_profile(file, "another", DECODE, None)
    with pytest.raises(ProfileModelError):
        write_profile(file, dataclasses.replace(one, model="another"))
    for shape, routing in ((VERIFY, None), (DECODE, RoutingOptions(denominator="frozen")), (DECODE, RoutingOptions(expert_topp=0.5))):
        with pytest.raises(MissingProfileError, match=f"colibri-jax quality .* --sensitivity .*--scopes {shape.kind}"):
            find_profile(file, "m", shape, routing)
    write_profile(file, dataclasses.replace(one, shape=StepShape(kind="verify", rows=3)))
    with pytest.raises(MissingProfileError, match="got: decode aggregate, verify aggregate, steps of 3"):
        find_profile(file, "m", VERIFY, None)


def damages() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    def at(*keys: Any, value: Any) -> Callable[[Any], Any]:
        def change(raw: Any) -> Any:
            place = raw
            for key in keys[:-1]:
                place = place[key]
            if value is None:
                del place[keys[-1]]
            else:
                place[keys[-1]] = value
            return raw

        return change

    one = ("profiles", 0)
    yield "format", at("format", value="colibri_jax budget profile 9")
    yield "no object", lambda raw: [raw]
    yield "no field", at(*one, "tokens", value=None)
    yield "another field", at(*one, "colour", value=1)
    yield "negative", at(*one, "steps", value=-1)
    yield "true", at(*one, "windows", value=True)
    yield "no layers", at(*one, "layers", value=[])
    yield "not finite", at(*one, "layers", 0, "cuts", 0, "kld", value=float("nan"))
    yield "text for a number", at(*one, "layers", 0, "cuts", 0, "kept", value="4")
    yield "twice the same budget", lambda raw: at(*one, "layers", 0, "cuts", value=raw["profiles"][0]["layers"][0]["cuts"] * 2)(raw)
    yield "more with a cut", at(*one, "layers", 0, "cuts", 0, "kept", value=10**9)
    yield "too many bytes", at(*one, "layers", 0, "expert_bytes", value=2**63)
    yield "unknown policy", at(*one, "rule", "policy", value="best")
    yield "a rule with a budget", at(*one, "rule", "budget", value=3)
    yield "unknown steps", at(*one, "shape", "kind", value="sideways")
    yield "cuts are no list", at(*one, "layers", 0, "cuts", value=5)


@pytest.mark.parametrize(("name", "damage"), [pytest.param(*case, id=case[0]) for case in damages()])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Callable[[Any], Any]) -> None:
    file = tmp_path / PROFILE_FILE
    write_profile(file, tables(4))
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    with pytest.raises(ProfileFileError, match=PROFILE_FILE):
        read_profiles(file, "m")
    file.write_text(file.read_text()[:-20])
    with pytest.raises(ProfileFileError, match="JSON"):
        read_profiles(file, "m")


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("profile:0.65", ProfileShare(0.65)),
        (" profile:1 ", ProfileShare(1.0)),
        ("profile:0.5:a/b.json", ProfileShare(0.5, Path("a/b.json"))),
        ("profile:0.5:c:d.json", ProfileShare(0.5, Path("c:d.json"))),
    ],
)
def test_a_budget_may_be_a_share_of_a_profile(text: str, budget: ProfileShare) -> None:
    for parse in (parse_budgets, parse_one_of_several):
        assert parse(text) == budget
        assert parse(show_value("budget", budget)) == budget


@pytest.mark.parametrize("text", ["profile:", "profile:0", "profile:1.5", "profile:-1", "profile:x", "profile:nan", "profile::f"])
def test_what_is_no_share_is_refused(text: str) -> None:
    for parse in (parse_budgets, parse_one_of_several):
        with pytest.raises(click.BadParameter, match="above 0, at most 1"):
            parse(text)


def test_lists_have_colons_where_commas_part_budgets() -> None:
    assert [parse_one_of_several(text) for text in ("4", "off", "4:off:6")] == [4, 0, (4, 0, 6)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The shipped model, with a profile beside it."""
    directory = tmp_path_factory.mktemp("model") / "m"
    directory.mkdir()
    for file in SHIPPED_MODEL.iterdir():
        if file.is_file() and file.name not in (PROFILE_FILE, "recommended.json"):
            shutil.copy(file, directory)
    found = json.loads(run("quality", directory, *measuring(text), "--json", "--sensitivity"))
    assert found["passed"]
    assert found["file"] == str(directory / PROFILE_FILE)
    return directory


def measuring(text: Path) -> list[str]:
    return ["--text", str(text), "--window", "24", "--prefix", "8", "--tokens", "32", "--denominators", "frozen", "--budgets", "6,4"]


def run(command: str, *arguments: Any, status: int = 0) -> str:
    done = CliRunner().invoke(main, [command, *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit | ColibriError):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.stdout if status == 0 else done.stderr


def test_the_profile_is_what_single_cuts_measure(container: Path, text: Path) -> None:
    model = Container.open(container)
    (profile,) = read_profiles(container / PROFILE_FILE, container_fingerprint(model))
    assert (profile.tokens, profile.windows, profile.steps, profile.describe()) == (32, 2, 32, "decode aggregate frozen")
    assert [layer.layer for layer in profile.layers] == list(model.runnable_config.moe_layers)
    for layer in profile.layers:
        assert (layer.distinct, [cut.kept for cut in layer.cuts]) == (8 * 32, [4 * 32, 6 * 32])
    lists = [":".join(str(n if i == index else 0) for i in range(5)) for index in range(5) for n in (4, 6)]
    rows = json.loads(run("quality", container, *measuring(text)[:-1], ",".join(lists), "--json"))["rows"]
    assert [(cut.kld, cut.kld_error) for layer in profile.layers for cut in layer.cuts] == [
        (row["quality"]["kld_windows"]["value"], row["quality"]["kld_windows"]["error"]) for row in rows
    ]


def test_a_list_of_the_profile_is_run(container: Path, text: Path) -> None:
    (profile,) = read_profiles(container / PROFILE_FILE, container_fingerprint(Container.open(container)))
    listed = choose(profile, 0.8)
    arguments = [container, "--prompt", "a", "--max-new-tokens", "2", "--denominator", "frozen", "--json"]
    found = json.loads(run("generate", *arguments, "--budget", "profile:0.8"))
    assert found["options"]["budget"] == list(listed)
    assert found["option_sources"]["budget"] == "profile:0.8"
    assert json.loads(run("generate", *arguments, "--budget", ",".join(map(str, listed))))["text"] == found["text"]
    shown = CliRunner().invoke(main, ["generate", *map(str, arguments)], env={"EXPERT_BUDGET": "profile:0.8"}).stderr
    assert f"budget={','.join(map(str, listed))} (EXPERT_BUDGET, profile:0.8)" in shown
    rows = json.loads(run("quality", container, *measuring(text)[:-1], "profile:0.8,4", "--json"))["rows"]
    assert [row["routing"]["budget"] for row in rows] == [list(listed), 4]
    bench = ["sweep", container, "--budget", "profile:0.8", "--tokens", 1, "--prompt-tokens", 2, "--threads", 1, "--json"]
    figures = {row["budget"] for row in json.loads(run("bench", *bench))["rows"]}
    assert figures == {":".join(map(str, listed))}


def test_profiles_that_do_not_fit_are_refused(container: Path, text: Path, tmp_path: Path) -> None:
    generate = [container, "--prompt", "a", "--max-new-tokens", "2", "--budget"]
    assert "MissingProfileError: no budget profile for decode aggregate;" in run("generate", *generate, "profile:0.8", status=2)
    frozen = [*generate, "profile:0.8", "--denominator", "frozen"]
    assert "one kind of steps" in run("generate", *frozen, "--budget-scope", "all", status=2)
    assert "no budget profile for verify aggregate frozen, steps of 4" in run("generate", *frozen, "--budget-scope", "verify", status=2)
    assert "reads so little" in run("generate", *generate, "profile:0.3", "--denominator", "frozen", status=2)
    elsewhere = tmp_path / "absent.json"
    missing = run("generate", *generate, f"profile:0.8:{elsewhere}", status=2)
    assert f"colibri-jax quality MODEL_DIR --text FILE --sensitivity {elsewhere}" in missing
    raw = (container / PROFILE_FILE).read_text()
    elsewhere.write_text(raw.replace(json.loads(raw)["profiles"][0]["model"], "0" * 16))
    assert "ProfileModelError" in run("generate", *generate, f"profile:0.8:{elsewhere}", status=2)
    assert "ProfileModelError" in run("quality", container, *measuring(text), "--sensitivity", elsewhere, status=2)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--scopes", "decode,verify"], "one rule"),
        (["--policies", "aggregate,floor"], "one rule"),
        (["--floor", "1,2"], "one rule"),
        (["--expert-topk", "0,6"], "one rule"),
        (["--coverage", "0.9", "--policies", "coverage"], "cut alone"),
        (["--budgets", "4:4:4:4:4"], "single budget"),
        (["--budgets", "profile:0.5"], "single budget"),
        (["--budgets", "off"], "cuts nothing"),
        (["--scopes", "all", "--prompt", "4"], "no profile of such steps"),
        (["--plot", "x.svg"], "no curve"),
    ],
)
def test_what_makes_no_profile_is_refused_before_measuring(text: Path, tmp_path: Path, arguments: list[str], reason: str) -> None:
    assert reason in run("quality", *measuring(text), "--sensitivity", tmp_path / "p.json", *arguments, status=2)
    assert not list(tmp_path.iterdir())


def test_a_model_that_differs_from_itself_leaves_no_profile(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from colibri_jax.quality.report import Control

    monkeypatch.setattr(Control, "holds", property(lambda self: False))
    run("quality", *measuring(text), "--sensitivity", tmp_path / "p.json", status=1)
    assert not list(tmp_path.iterdir())


def test_the_table_shows_every_layer(text: Path, tmp_path: Path) -> None:
    shown = run("quality", *measuring(text), "--sensitivity", tmp_path / "p.json")
    assert "N = 4" in shown
    assert shown.count("(6.00)") == 5
    assert "profile:0.5: 4,4,4,4,4, 50.0% of the expert bytes" in shown
    assert f"written to {tmp_path / 'p.json'}" in shown.replace("\n", "")


def test_a_profile_outlives_versions_and_backends() -> None:
    container = Container.open(SHIPPED_MODEL)
    assert container_fingerprint(container) == container_fingerprint(Container.open(SHIPPED_MODEL))
    assert container_fingerprint(container) != model_fingerprint(container, "native", "w4a8")
