"""The command line: environment and flags, what is printed where, exit codes, JSON."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fakes import FakeModel, byte_tokenizer, write_model_directory

import colibri_jax
from colibri_jax.cli import COMMANDS, main
from colibri_jax.errors import MemoryBudgetError, OutputExistsError
from colibri_jax.routing_spec import RoutingOptions
from colibri_jax.tokenizer import ChatTokenizer

ENVIRONMENT = ("SNAP", "PROMPT", "NGEN", "EXPERT_BUDGET", "TOPK", "TOPP", "MTP", "CAP", "RAM_GB", "READER", "DRAFT")


class Loader:
    """Stands in for `colibri_jax.load`: keeps the arguments and hands out a fake that writes `answer`."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.answer = "héllo €"
        self.interrupt_at: int | None = None
        self.error: Exception | None = None
        self.model: FakeModel | None = None

    def __call__(self, path: Path, **arguments: Any) -> FakeModel:
        if self.error is not None:
            raise self.error
        self.arguments = {"path": path, **arguments}
        ids = byte_tokenizer().encode(self.answer).ids
        n_prompt = len(ChatTokenizer.from_directory(path).encode_chat([{"role": "user", "content": "hi"}]))
        self.model = FakeModel(
            script={n_prompt + i: token for i, token in enumerate(ids)},
            interrupt_at=self.interrupt_at,
            routing=arguments["routing"],
            budget_scopes=arguments["budget_scopes"],
            context_positions=arguments["context_positions"],
        )
        return self.model


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    made = Loader()
    monkeypatch.setitem(vars(colibri_jax), "load", made)
    return made


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model_directory(tmp_path / "model"))


def call(*arguments: str, **environment: str) -> Result:
    result = CliRunner().invoke(main, list(arguments), env=environment, prog_name="colibri-jax")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# ---- the whole


def test_the_answer_goes_to_stdout_and_everything_else_to_stderr(loader: Loader, model: str) -> None:
    result = call("generate", model, "--prompt", "hi")
    assert result.exit_code == 0
    assert result.stdout == "héllo €\n"
    for fragment in ("max-new-tokens=64", "running: backend=native  precision=w4a8  isa=scalar", "tok/s", "ended by stop token"):
        assert fragment in result.stderr
    assert "EXPERT_BUDGET=" not in result.stderr
    assert "experimental" not in result.stderr


def test_the_commands_of_the_proposal_work_through_the_environment(loader: Loader, model: str) -> None:
    result = call("generate", "--cache-experts", "64", SNAP=model, MTP="0", EXPERT_BUDGET="4", PROMPT="hi", NGEN="3")
    assert result.exit_code == 0
    assert result.stdout == "hé\n"
    assert loader.arguments["path"] == Path(model)
    assert loader.arguments["routing"] == RoutingOptions(budget=4)
    assert loader.arguments["budget_scopes"] == {"decode"}
    assert loader.arguments["cache_experts"] == 64
    effective = result.stderr.splitlines()[0]
    for fragment in (
        f"model-dir={model} (SNAP)",
        "max-new-tokens=3 (NGEN)",
        "budget=4 (EXPERT_BUDGET)",
        "cache-experts=64",
        "prefill-chunk=512",
    ):
        assert fragment in effective
    assert "cache-experts=64 (" not in effective
    assert "policy aggregate: quality measured on the model that ships alone" in result.stderr
    assert "EXPERT_BUDGET=4 (dropped 16 experts, ~0.3 GB I/O saved)\n" in result.stderr


def test_flags_win_over_the_environment(loader: Loader, model: str) -> None:
    environment = {"EXPERT_BUDGET": "4", "NGEN": "5", "TOPK": "3", "TOPP": "0.5", "CAP": "7", "PROMPT": "no", "SNAP": "/nowhere"}
    flags = ["--budget", "off", "--max-new-tokens", "2", "--expert-topk", "6", "--cache-experts", "9", "--prompt", "hi"]
    result = call("generate", model, *flags, **environment)
    assert result.stdout == "h\ufffd\n"  # two tokens: the second is half of an é, which the end makes visible
    assert loader.arguments["routing"] == RoutingOptions(expert_topk=6, expert_topp=0.5)
    assert loader.arguments["cache_experts"] == 9
    assert "expert-topp=0.5 (TOPP)" in result.stderr
    assert "budget=off  " in result.stderr


def test_every_engine_option_reaches_the_loader_and_none_is_made_up(loader: Loader, model: str) -> None:
    call("generate", model, "--prompt", "hi")
    assert set(loader.arguments) == {"path", "backend", "routing", "budget_scopes", "context_positions"}
    flags = [
        "--threads=2",
        "--io=buffered",
        "--reader=pread",
        "--cache-policy=lru",
        "--isa=scalar",
        "--backend=reference",
        "--precision=w4a32",
        "--ram-gb=1.5",
        "--group-size=32",
    ]
    call("generate", model, "--prompt", "hi", READER="uring")
    assert loader.arguments["reader"] == "uring"
    call("generate", model, "--prompt", "hi", *flags, READER="uring")
    expected = {
        "threads": 2,
        "io": "buffered",
        "reader": "pread",
        "cache_policy": "lru",
        "isa": "scalar",
        "backend": "reference",
        "precision": "w4a32",
        "ram_bytes": 1_500_000_000,
    }
    assert loader.arguments.items() >= {**expected, "group_size": 32}.items()


@pytest.mark.parametrize(
    ("flags", "scopes"),
    [
        ([], {"decode"}),
        (["--budget-scope", "prefill"], {"prefill"}),
        (["--budget-scope", "prefill", "--budget-scope", "verify"], {"prefill", "verify"}),
        (["--budget-scope", "all"], {"prefill", "decode", "verify"}),
    ],
)
def test_scopes_are_those_named(loader: Loader, model: str, flags: list[str], scopes: set[str]) -> None:
    result = call("generate", model, "--prompt", "hi", "--budget", "4", *flags)
    assert loader.arguments["budget_scopes"] == scopes
    assert ("part of the result" in result.stderr) == ("prefill" in scopes)


def test_a_budget_that_cannot_act_says_so(loader: Loader, model: str) -> None:
    result = call("generate", model, "--prompt", "hi", "--budget", "16")
    assert "no effect: 16 ≥ top-k 8 in scope decode\n" in result.stderr


def test_an_option_that_changes_nothing_says_so(loader: Loader, model: str) -> None:
    result = call("generate", model, "--prompt", "hi", "--budget-scope", "all", "--seed", "3")
    assert "no effect: --budget-scope without --budget\n" in result.stderr
    assert "no effect: --seed without --temperature (greedy)\n" in result.stderr


# ---- drafts


def test_drafts_leave_the_text_and_show_what_they_did(loader: Loader, model: str) -> None:
    loader.answer = "abc abc abc abc"
    plain = call("generate", model, "--prompt", "hi")
    assert "drafts:" not in plain.stderr
    drafted = call("generate", model, "--prompt", "hi", "--draft", "lookup", "--no-pause", DRAFT="2")
    assert drafted.stdout == plain.stdout
    for fragment in (
        "draft=lookup  draft-depth=2 (DRAFT)",
        "drafts: lookup, depth 2, exact, acceptance equal",
        "tokens per verification step",
    ):
        assert fragment in drafted.stderr
    data = json.loads(call("generate", model, "--prompt", "hi", "--draft", "lookup", "--no-pause", "--json").stdout)
    assert data["speculation"]["accepted"][0] > 0
    assert data["options"]["draft_depth"] == 3
    assert json.loads(call("generate", model, "--prompt", "hi", "--json").stdout)["speculation"] is None


def test_union_says_that_it_is_lossy(loader: Loader, model: str) -> None:
    flags = ["--draft", "lookup", "--speculation", "union", "--budget", "4", "--budget-scope", "verify"]
    result = call("generate", model, "--prompt", "hi", *flags)
    assert "lossy: the rows of a verification share a budget" in result.stderr
    assert "union (lossy, votes uniform)" in result.stderr
    text = call("generate", "--help").stdout
    assert "union is lossy" in " ".join(text.split())
    assert "LOSSY" in text


def test_options_of_drafts_without_effect_say_so(loader: Loader, model: str) -> None:
    result = call("generate", model, "--prompt", "hi", "--draft-depth", "2", "--no-pause", MTP="0")
    assert "no effect: --draft-depth without --draft\n" in result.stderr
    assert "no effect: --no-pause without --draft\n" in result.stderr
    result = call("generate", model, "--prompt", "hi", "--draft", "lookup", "--budget", "4", "--budget-scope", "all", MTP="1")
    assert "draft=lookup" in result.stderr
    assert "no effect: exact speculation routes the rows of scope verify as scope decode does\n" in result.stderr


# ---- two sizes of one cache


def test_two_cache_sizes_given_in_the_same_way_are_refused(loader: Loader, model: str) -> None:
    for arguments, environment in ((["--cache-experts", "2", "--ram-gb", "1"], {}), ([], {"CAP": "2", "RAM_GB": "1"})):
        result = call("generate", model, "--prompt", "hi", *arguments, **environment)
        assert result.exit_code == 2
        assert "two sizes for one cache" in result.stderr
        assert loader.model is None


def test_a_flag_sets_the_other_size_of_the_environment_aside_and_says_so(loader: Loader, model: str) -> None:
    result = call("generate", model, "--prompt", "hi", "--cache-experts", "2", RAM_GB="1")
    assert (loader.arguments["cache_experts"], "ram_bytes" in loader.arguments) == (2, False)
    assert "ram-gb=off (RAM_GB set aside by --cache-experts)" in result.stderr
    call("generate", model, "--prompt", "hi", "--ram-gb", "1", CAP="2")
    assert (loader.arguments["ram_bytes"], "cache_experts" in loader.arguments) == (10**9, False)


# ---- JSON


def test_json_is_one_object_with_everything(loader: Loader, model: str) -> None:
    result = call("generate", model, "--prompt", "hi", "--json", EXPERT_BUDGET="4")
    data = json.loads(result.stdout)
    assert set(data) == {
        "schema",
        "text",
        "token_ids",
        "prompt_tokens",
        "new_tokens",
        "stop_reason",
        "stop_token",
        "options",
        "option_sources",
        "routing",
        "budget_scopes",
        "engine",
        "scopes",
        "total",
        "swap_share",
        "budget_line",
        "notes",
        "speculation",
        "divergence",
    }
    assert data["text"] == "héllo €"
    assert byte_tokenizer().decode(data["token_ids"]) == data["text"]
    assert (data["options"]["budget"], data["option_sources"]["budget"]) == (4, "EXPERT_BUDGET")
    assert data["options"]["model_dir"] == model
    assert data["engine"]["isa"] == "scalar"
    assert data["notes"] == ["policy aggregate: quality measured on the model that ships alone; `colibri-jax quality` measures others"]
    assert data["scopes"]["decode"]["steps"] == data["new_tokens"]
    assert data["budget_line"] in result.stderr


# ---- ends and errors


def test_ctrl_c_prints_what_there_is_with_its_statistics_and_exits_130(loader: Loader, model: str) -> None:
    loader.interrupt_at = 2
    result = call("generate", model, "--prompt", "hi", "--budget", "4")
    assert result.exit_code == 130
    assert result.stdout == "h\ufffd\n"
    assert "ended by interrupted" in result.stderr
    assert "EXPERT_BUDGET=4 (dropped 8 experts" in result.stderr


def test_ctrl_c_while_loading_exits_130(loader: Loader, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(colibri_jax), "load", interrupt)
    result = call("generate", model, "--prompt", "hi")
    assert (result.exit_code, result.stdout) == (130, "")


def test_a_named_error_is_one_line_and_exit_code_2(loader: Loader, model: str) -> None:
    loader.error = MemoryBudgetError("too small\nby far", where="ram_bytes", expected=">= 10", got=1)
    result = call("generate", model, "--prompt", "hi")
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last == "colibri-jax: MemoryBudgetError: too small by far; where: ram_bytes; expected: >= 10; got: 1"
    assert result.stdout == ""


def test_an_over_long_prompt_is_an_error_before_the_model_is_loaded(loader: Loader, model: str) -> None:
    result = call("generate", model, "--prompt", "x" * 200)
    assert (result.exit_code, loader.model) == (2, None)
    assert "PromptTooLongError" in result.stderr
    assert "at most 127 tokens" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "nothing to answer"),
        (["--prompt", "hi"], {"MTP": "1"}, "no MTP block to draft with"),
        (["--prompt", "hi", "--draft", "mtp"], {}, "no MTP block to draft with"),
        (["--prompt", "hi", "--draft", "lookup", "--policy", "resident", "--allow-irreproducible"], {}, "what the cache holds"),
        (["--prompt", "hi", "--draft-depth", "9"], {}, "--draft-depth"),
        (["--prompt", "hi"], {"DRAFT": "0"}, "DRAFT"),
        (["--prompt", "hi", "--raw", "--system", "s"], {}, "a raw prompt has no roles"),
        (["--prompt", "hi", "--expert-topp", "1.5"], {}, "share out of range"),
        (["--prompt", "hi", "--temperature", "-1"], {}, "temperature out of range"),
        (["--prompt", "hi", "--budget", "-3"], {}, "neither a count of experts nor 'off'"),
        (["--prompt", "hi", "--budget", "four"], {}, "neither a count of experts nor 'off'"),
        (["--prompt", "a\udcffb"], {}, "a stray byte at character 1"),
        (["--prompt", "hi"], {"EXPERT_BUDGET": "x"}, "EXPERT_BUDGET"),
        (["--prompt", "hi"], {"NGEN": "0"}, "NGEN"),
    ],
)
def test_bad_options_are_refused_before_loading(
    loader: Loader, model: str, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    result = call("generate", model, *arguments, **environment)
    assert (result.exit_code, loader.model) == (2, None)
    assert message in result.stderr


def test_directories_that_hold_no_model_are_named(loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, message in ((tmp_path / "none", "no such model directory"), (tmp_path, "the directory holds no model")):
        result = call("generate", str(path), "--prompt", "hi")
        assert result.exit_code == 2
        assert message in result.stderr
        assert str(path) in result.stderr
    monkeypatch.setattr("colibri_jax.cli.options.SHIPPED_MODEL", tmp_path / "none")
    assert "none ships with this installation" in call("generate", "--prompt", "hi").stderr


def test_without_a_directory_the_shipped_model_is_used(loader: Loader, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colibri_jax.cli.options.SHIPPED_MODEL", Path(model))
    assert call("generate", "--prompt", "hi").exit_code == 0
    assert loader.arguments["path"] == Path(model)


def test_system_and_raw_prompts_are_encoded_as_such(loader: Loader, model: str) -> None:
    lengths = []
    for flags in ([], ["--system", "be"], ["--raw"]):
        data = json.loads(call("generate", model, "--prompt", "hi", "--json", *flags).stdout)
        lengths.append(data["prompt_tokens"])
    assert lengths == [8, 12, 4]


# ---- help


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_loads_neither_jax_nor_the_extension(arguments: list[str]) -> None:
    code = "import sys; from colibri_jax.cli import main; main(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {"colibri_jax.cli", "click"} <= loaded
    assert not {"jax", "jaxlib", "colibri_jax._native", "colibri_jax.reference"} & loaded
    if "generate" not in arguments:
        assert not {"tokenizers", "rich", "jinja2"} & loaded


def test_help_teaches_what_a_budget_does() -> None:
    text = " ".join(call("generate", "--help").stdout.split())
    for fragment in (
        "distinct ones in that step",
        "emptied",
        "shared experts only",
        "off unless asked for",
        "What each policy costs is measured",
        "a flag wins",
    ):
        assert fragment in text
    for name in ENVIRONMENT:
        assert name in text


def test_the_list_of_commands_is_what_help_shows() -> None:
    text = call("--help").stdout
    for name, purpose in COMMANDS.items():
        assert f"{name}" in text
        assert purpose in text
    assert call("nonsense").exit_code == 2


# ---- convert and inspect: what reaches the container's functions


@dataclasses.dataclass(frozen=True)
class Summary:
    path: Path = Path("there")
    expert_bytes: int = 12

    def lines(self) -> list[str]:
        return ["first line", "second line"]


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Puts stand-ins where the commands look up the container's functions; returns what they are called with."""
    seen: dict[str, Any] = {}

    def plan_conversion(source: Path, target: Path, **options: Any) -> Summary:
        seen["plan"] = (source, target, options)
        if target.exists():
            raise OutputExistsError("finished", where=str(target))
        return Summary()

    def run_conversion(plan: Summary, progress: Any) -> None:
        progress(5, 10, "a.weight")
        progress(10, 10, "b.weight")
        seen["ran"] = True

    def describe(path: Path, **options: Any) -> Summary:
        seen["describe"] = (path, options)
        return Summary()

    functions = {"convert": (plan_conversion, run_conversion), "inspect": (describe,)}
    for name, made in functions.items():
        module = types.ModuleType(name)
        vars(module).update({f.__name__: f for f in made})
        monkeypatch.setitem(sys.modules, f"colibri_jax.container.{name}", module)
        monkeypatch.delitem(sys.modules, f"colibri_jax.cli.{name}", raising=False)
    return seen


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {"layout": "rows16", "group_size": 64, "scales": "f32"}),
        (["--scales", "f16"], {"layout": "rows16", "group_size": 64, "scales": "f16"}),
        (
            ["--layout", "colibri", "--group-size", "32", "--shard-gb", "0.5"],
            {"layout": "row_major", "group_size": 32, "scales": "f32", "shard_bytes": 500_000_000},
        ),
    ],
)
def test_convert_prints_its_plan_and_runs_it(container: dict[str, Any], tmp_path: Path, flags: list[str], options: dict[str, Any]) -> None:
    result = call("convert", str(tmp_path / "hf"), str(tmp_path / "out"), *flags)
    assert result.exit_code == 0
    assert container["plan"] == (tmp_path / "hf", tmp_path / "out", options)
    assert container["ran"]
    assert result.stdout.splitlines() == ["first line", "second line", f"done: {tmp_path / 'out'}"]


def test_convert_refuses_what_the_plan_refuses(container: dict[str, Any], tmp_path: Path) -> None:
    result = call("convert", str(tmp_path / "hf"), str(tmp_path))
    assert result.exit_code == 2
    assert "OutputExistsError: finished" in result.stderr
    assert "ran" not in container


def test_inspect_prints_lines_or_json(container: dict[str, Any], tmp_path: Path) -> None:
    assert call("inspect", str(tmp_path), "--ram-gb", "2").stdout == "first line\nsecond line\n"
    assert container["describe"] == (tmp_path, {"ram_bytes": 2_000_000_000, "group_size": None})
    assert json.loads(call("inspect", "--json", SNAP=str(tmp_path)).stdout) == {"path": "there", "expert_bytes": 12}
    assert container["describe"][1]["ram_bytes"] > 0


@pytest.mark.parametrize("amount", ["nan", "inf", "1e30", "0", "-1", "much"])
@pytest.mark.parametrize("arguments", [("generate", "--ram-gb"), ("inspect", "--ram-gb"), ("convert", "a", "b", "--shard-gb")])
def test_an_amount_of_bytes_is_finite_and_positive(arguments: tuple[str, ...], amount: str) -> None:
    result = call(*arguments, amount)
    assert result.exit_code == 2
    assert "Invalid value" in result.stderr
