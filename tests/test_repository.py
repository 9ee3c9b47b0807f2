"""Rules of the repository itself: file lengths, first lines, words, and that the README's commands exist."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from colibri_jax import cli

ROOT = Path(__file__).parents[1]
SOURCE_ENDINGS = {".py", ".cpp", ".h"}
TEXT_ENDINGS = SOURCE_ENDINGS | {".md", ".toml", ".cmake", ".txt", ".json", ".jsonl", ""}
PARTS = (".ci", "colibri_jax", "native", "tests", "validation", "docs")

# Paths of one machine or home, registries of packages, and numbers of somebody's tracker. Taken apart, so that this line is none.
FORBIDDEN = re.compile(r"(?<![\w.])/(work|tmp|home|root|opt)/[a-z]|://[^\s)]*(pypi|debian|npm)|index[-]url|\bissue #?\d+", re.IGNORECASE)
PLACEHOLDER = re.compile(r"@[A-Z][A-Z0-9_]*@")


@functools.cache
def files() -> tuple[Path, ...]:
    """Every text file that belongs to the repository: those at its root, and those of its parts."""
    top = [path for path in ROOT.iterdir() if path.is_file()]
    below = [path for part in PARTS for path in (ROOT / part).rglob("*") if path.is_file()]
    return tuple(
        sorted(path for path in top + below if path.suffix in TEXT_ENDINGS and "__pycache__" not in path.parts and path.name != ".git")
    )


def longest_allowed(path: Path) -> int:
    """Lines that a source file may have."""
    if path.is_relative_to(ROOT / "tests"):
        return 600
    return 400 if path.suffix == ".py" else 350


def forbidden_words(text: str) -> list[str]:
    """Every match of the forbidden patterns, with its line number."""
    return [f"{number}: {found.group()}" for number, line in enumerate(text.split("\n"), 1) for found in FORBIDDEN.finditer(line)]


def test_files_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in files()}
    assert {"README.md", "Makefile", "pyproject.toml", ".ci/run", "colibri_jax/errors.py", "native/CMakeLists.txt"} <= names


def test_files_are_not_too_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf8").splitlines()) for path in files() if path.suffix in SOURCE_ENDINGS}
    too_long = [f"{path.relative_to(ROOT)}: {length}" for path, length in lengths.items() if length > longest_allowed(path)]
    assert too_long == []


def test_first_line_says_what_a_file_is() -> None:
    silent = []
    for path in files():
        first = path.read_text(encoding="utf8").split("\n", 1)[0]
        expected = {".py": '"""', ".cpp": "//", ".h": "//"}.get(path.suffix)
        if expected and not (first.startswith(expected) and len(first) > len(expected) + 10):
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []


def test_text_names_no_machine() -> None:
    # Held-out text and its headwords quote the world as it is.
    quoting = {"heldout.jsonl", "heldout_names.json", "tokenizer.json", Path(__file__).name}
    found = {str(path.relative_to(ROOT)): forbidden_words(path.read_text(encoding="utf8")) for path in files() if path.name not in quoting}
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize("text", ["open('/tmp/x')", "see /home/me", "https://files.pypi.invalid/simple", "--index-url", "fixes issue 12"])
def test_planted_word_is_found(text: str) -> None:
    assert forbidden_words(f"one\n{text}") != []


@pytest.mark.parametrize("text", ["src/tmp/x", "/proc/self/io", "#!/usr/bin/env bash", "apt-get download dict-foldoc", "an issue of trust"])
def test_harmless_word_is_not_found(text: str) -> None:
    assert forbidden_words(text) == []


def test_no_placeholder_is_left() -> None:
    left = {str(path.relative_to(ROOT)): PLACEHOLDER.findall(path.read_text(encoding="utf8")) for path in files() if path.suffix == ".md"}
    assert {path: names for path, names in left.items() if names} == {}


def test_links_of_the_documents_exist() -> None:
    broken = []
    for path in files():
        if path.suffix == ".md":
            targets = re.findall(r"\]\(([^)#:\s]+)\)", path.read_text(encoding="utf8"))
            broken += [f"{path.name}: {target}" for target in targets if not (path.parent / target).exists()]
    assert broken == []


def commands(markdown: str) -> Iterator[list[str]]:
    """Words of every command in a document's code blocks and inline code, comments and leading assignments removed."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.split("\n")] + re.findall(r"`([^`\n]+)`", markdown)
    for line in lines:
        if not re.match(r"(\w+=\S+ |\w+=\"[^\"]*\" )*(make|colibri-jax|python) ", line):
            continue
        words = shlex.split(line, comments=True)
        yield words[next(index for index, word in enumerate(words) if "=" not in word) :]


def command_group() -> click.Group:
    """The command line as click knows it."""
    return next(value for value in vars(cli).values() if isinstance(value, click.Group))


def unknown_commands(markdown: str) -> list[str]:
    """Commands of a document that name no make target, no subcommand, no flag, or no script."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf8"), re.MULTILINE))
    group = command_group()
    context = click.Context(group)
    unknown = []
    for program, *words in commands(markdown):
        if program == "make":
            wrong = [word for word in words if "=" not in word and word not in targets]
        elif program == "python":
            wrong = [word for word in words[:1] if word.endswith(".py") and not (ROOT / word).exists()]
        elif (command := group.get_command(context, words[0])) is None:
            wrong = words[:1]
        else:
            if isinstance(command, click.Group):
                command = command.get_command(context, words[1] if len(words) > 1 else "") or command
            flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
            wrong = [word for word in words if word.startswith("--") and word.split("=")[0] not in flags]
        unknown += [f"{program} {' '.join(words)}: {word}" for word in wrong]
    return unknown


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_commands_of_the_documents_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf8")
    assert sum(1 for _ in commands(text)) >= 3
    assert unknown_commands(text) == []


@pytest.mark.parametrize(
    "line",
    [
        "make rum",
        "colibri-jax generat --budget 4",
        "colibri-jax bench io --plot x.svg",
        "A=1 colibri-jax generate --badget 4",
        "python validation/absent.py",
    ],
)
def test_planted_command_is_found(line: str) -> None:
    assert len(unknown_commands(f"text\n```\n{line}   # why\n```\n")) == 1
