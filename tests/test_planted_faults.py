"""The planted faults still fit the sources, and their runner tells what was seen from what was not and from what proves nothing.

The runner is tried on a tree of two files; planting the real faults takes most of an hour: `python validation/planted_faults.py`.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import planted_faults
import planted_tree
import planted_verdict
import pytest
from click import ClickException
from click.testing import CliRunner
from planted_tree import Tree, copy_tree
from planted_verdict import FAULTS, Mutation, Verdict, examine, faults_caught, load_mutations, record, summary
from rich.console import Console

ROOT = Path(__file__).parents[1]

# ---- the table ------------------------------------------------------------------------------------------------------


def test_every_old_text_occurs_once_and_every_fault_is_planted() -> None:
    mutations = load_mutations(ROOT)
    assert {mutation.fault for mutation in mutations} == set(FAULTS)
    assert len(FAULTS) == 15


def test_faults_are_planted_in_both_implementations() -> None:
    """All but the cache's, which the reference does not have."""
    for fault in set(FAULTS) - {"stale slot"}:
        sides = {mutation.native for mutation in load_mutations(ROOT) if mutation.fault == fault}
        assert sides == {True, False}, fault


def test_likely_tests_exist() -> None:
    assert all((ROOT / "tests" / file).is_file() for mutation in load_mutations(ROOT) for file in mutation.likely)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("x = 1", "x = 2"), "occurs 0 times"),
        (("= ", "== "), "occurs 2 times"),
        (("one = 1", "one = 1"), "nothing is changed"),
        (("NaN", "NAN"), "no fault is called"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one = 1\ntwo = 2\n")
    fault = change[1] if change[0] == "NaN" else "NaN"
    edit = ["a.py", *(change if change[0] != "NaN" else ("one = 1", "one = 2"))]
    entry = f"[[mutation]]\nfault = {json.dumps(fault)}\nname = 'm'\nwhat = ''\nlikely = []\nedits = [{json.dumps(edit)}]\n"
    (tmp_path / "table.toml").write_text(entry)
    with pytest.raises(ValueError, match=message):
        load_mutations(tmp_path, tmp_path / "table.toml")


# ---- the runner -----------------------------------------------------------------------------------------------------

SOURCES = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p no:cacheprovider"\n',
    "tiny_tree/__init__.py": "def double(x):\n    return 2 * x\n\n\nspare = 0\n",
    "tests/test_double.py": """
import pytest
from tiny_tree import double, spare

@pytest.fixture
def four():
    assert double(2) != 6, "in a fixture"
    return double(2)

def test_spare_in_passing():
    print(spare)

def test_of_a_fixture(four):
    assert four > 0

def test_double():
    assert double(3) == 6
""",
    "tests/test_planted_faults.py": "def test_left_out():\n    raise AssertionError('it is left out of the copy')\n",
}
FILE = "tiny_tree/__init__.py"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A copy of a package with one function and its tests."""
    for name, text in SOURCES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tree = Tree(tmp_path / "work", modules=["tiny_tree"], jobs=1)
    copy_tree(tmp_path / "source", tree.root)
    return tree


def mutation(old: str, new: str, *, likely: tuple[str, ...] = ("test_double.py",), file: str = FILE) -> Mutation:
    return Mutation("NaN", "planted", "something", likely, ((file, old, new),))


def told(tree: Tree, *change: str) -> tuple[str, tuple[str, ...]]:
    verdict = examine(tree, mutation(*change))
    return verdict.outcome, verdict.failed


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker of pytest-xdist hands down to the processes that it starts is not for runs of their own."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)


def test_the_suite_passes_without_a_fault(tree: Tree) -> None:
    run = tree.run_suite(["test_double.py"])
    assert (run.passed, run.tests, run.all_failed) == (True, 3, ())
    assert tree.import_problem() == ""


def test_a_fault_that_a_test_sees_is_caught(tree: Tree) -> None:
    assert told(tree, "2 * x", "2 + x") == ("caught", ("tests/test_double.py::test_double",))


def test_a_change_that_no_test_sees_survives_the_whole_suite(tree: Tree) -> None:
    verdict = examine(tree, mutation("spare = 0", "spare = 1"))
    assert (verdict.outcome, verdict.failed, verdict.told) == ("survived", (), "3 tests passed")


def test_the_rest_of_the_suite_runs_where_the_likely_tests_pass(tree: Tree) -> None:
    (tree.root / "tests" / "test_other.py").write_text("def test_other():\n    pass\n")
    verdict = examine(tree, mutation("2 * x", "2 + x", likely=("test_other.py",)))
    assert verdict.failed == ("tests/test_double.py::test_double",)


def test_a_failure_of_a_fixture_does_not_end_the_run_nor_count(tree: Tree) -> None:
    assert told(tree, "2 * x", "3 * x") == ("caught", ("tests/test_double.py::test_double",))
    outcome, failed = told(tree, "return 2 * x", "return 6")
    assert (outcome, failed) == ("invalid", ())


@pytest.mark.parametrize(
    ("new", "why"),
    [
        ("return 2 *", "SyntaxError"),
        ("return 2 * y", "NameError"),
        ("import os; os._exit(7)", "pytest ended with status 7 after 0 tests"),
    ],
)
def test_code_that_is_broken_or_ends_the_process_is_invalid(new: str, why: str, tree: Tree) -> None:
    verdict = examine(tree, mutation("return 2 * x", new, likely=()))
    assert (verdict.outcome, verdict.failed) == ("invalid", ())
    assert why in verdict.told


def test_processes_that_share_the_suite_tell_the_same(tree: Tree, tmp_path: Path) -> None:
    """As `make test` runs it. One of them that ends is not a check that failed."""
    shared = Tree(tmp_path / "work", modules=["tiny_tree"], jobs=2)
    assert examine(shared, mutation("2 * x", "2 + x", likely=())).failed == ("tests/test_double.py::test_double",)
    ended = examine(shared, mutation("return 2 * x", "import os; os._exit(7)", likely=()))
    assert (ended.outcome, ended.failed) == ("invalid", ())
    assert "(???: the process ended)" in ended.told


def test_a_run_without_end_is_invalid(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_tree, "LONGEST_SECONDS", 1)
    verdict = examine(tree, mutation("return 2 * x", "while True: pass", likely=()))
    assert (verdict.outcome, verdict.told) == ("invalid", "no end within 1 s")


def test_a_package_from_elsewhere_is_invalid(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other_tree.py").touch()
    foreign = Tree(tmp_path / "work", modules=["json"])
    assert examine(foreign, mutation("2 * x", "2 + x")).told.startswith("imported from elsewhere")


def test_finders_of_editable_installations_are_removed(tree: Tree, tmp_path: Path) -> None:
    """Such a finder is asked before the path is; the copy would be tested by name only."""
    code = "import sys\nclass Finder: __module__ = '_tiny_tree_editable'\nsys.meta_path.insert(0, Finder())\n"
    code += (tmp_path / "work" / "site" / "sitecustomize.py").read_text() + "assert not any(isinstance(f, Finder) for f in sys.meta_path)"
    exec(compile(code, "sitecustomize", "exec"), {})


def test_sources_are_as_before_after_a_fault(tree: Tree) -> None:
    examine(tree, mutation("2 * x", "2 + x"))
    assert (tree.root / FILE).read_text() == SOURCES[FILE]
    with pytest.raises(ValueError, match="0 times"), tree.changed([(FILE, "absent", "present")]):
        pass


def test_a_copy_follows_its_source_and_leaves_equal_files_alone(tree: Tree, tmp_path: Path) -> None:
    source, kept, changed = tmp_path / "source", tree.root / "pyproject.toml", tree.root / FILE
    before = kept.stat().st_mtime_ns
    changed.write_text("something else")
    (tree.root / "tests" / "test_gone.py").touch()
    copy_tree(source, tree.root)
    assert kept.stat().st_mtime_ns == before
    assert changed.read_text() == SOURCES[FILE]
    assert not (tree.root / "tests" / "test_gone.py").exists()


# ---- the answer -----------------------------------------------------------------------------------------------------


def verdicts(*outcomes: str) -> list[Verdict]:
    made = []
    for number, outcome in enumerate(outcomes):
        failed = ("tests/test_a.py::test_b[x|y]",) if outcome == "caught" else ()
        planted = Mutation(FAULTS[number // 2], f"m{number}", "what", (), (("a.py", "1", "2"), ("b.py", "1", "2")))
        made.append(Verdict(planted, outcome, failed, ", ".join(failed) or "why", 1.0))  # type: ignore[arg-type]
    return made


def test_a_fault_is_caught_where_all_its_mutations_are() -> None:
    found = verdicts("caught", "caught", "caught", "survived", "invalid", "caught")
    assert faults_caught(found) == {FAULTS[0]: True, FAULTS[1]: False, FAULTS[2]: False}
    answer = summary(found)
    assert (answer["planted"], answer["caught"]) == (3, 1)
    assert answer["faults"][3] == {
        "name": FAULTS[1],
        "mutation": "m3",
        "file": "a.py, b.py",
        "outcome": "survived",
        "caught": False,
        "failed": [],
        "told": "why",
        "seconds": 1.0,
    }
    text = record(found, None)
    assert "**1 of 3 faults caught**" in text
    assert "`tests/test_a.py::test_b[x\\|y]`" in text
    assert "**survived**: why" in text


@pytest.mark.parametrize(("outcome", "status"), [("caught", 0), ("survived", 1), ("invalid", 1)])
def test_the_command_fails_unless_all_are_caught(
    outcome: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the real table, without its copy, its build and its tests."""

    def made(tree: Tree, planted: Mutation) -> Verdict:
        return Verdict(planted, outcome, ("tests/test_a.py::test_b",) if outcome == "caught" else (), "why", 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(planted_faults, "examine", made)
    monkeypatch.setattr(planted_faults, "copy_tree", lambda source, target: None)
    target = tmp_path / "record.md"
    arguments = ["--work", str(tmp_path / "work"), "--only", "stale slot", "--skip-baseline", "--json", "--record", str(target)]
    done = CliRunner().invoke(planted_faults.main, arguments)
    assert done.exit_code == status, done.output
    answer = json.loads(done.stdout)
    assert (answer["planted"], answer["caught"], len(answer["faults"])) == (1, 1 - status, 3)
    assert target.read_text().count("\n| stale slot") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--all", "--only", "NaN"], "either --all or --only"),
        ([], "either --all or --only"),
        (["--only", "nowhere"], "no fault or mutation is called nowhere"),
    ],
)
def test_unknown_names_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(planted_faults.main, ["--work", str(tmp_path), *arguments])
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_work_directory_inside_the_tree_is_refused() -> None:
    done = CliRunner().invoke(planted_faults.main, ["--work", str(ROOT / "tests" / "work"), "--all"])
    assert (done.exit_code, "inside the tree" in done.stderr) == (2, True)


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = CliRunner().invoke(planted_faults.main, ["--work", str(tmp_path), "--all"])
    assert (done.exit_code, "another run" in done.stderr) == (2, True)


def test_a_suite_that_fails_by_itself_ends_the_command(tree: Tree) -> None:
    (tree.root / FILE).write_text("def double(x):\n    return x\n\n\nspare = 0\n")
    with pytest.raises(ClickException, match="test_double"):
        planted_faults.check_baseline(tree, Console(quiet=True))


def test_the_record_names_versions_and_the_size_of_the_suite(tree: Tree) -> None:
    text = record(verdicts("caught"), tree.run_suite(["test_double.py"]))
    assert "all 3 tests of the suite passed" in text
    assert planted_verdict.platform.python_version() in text
