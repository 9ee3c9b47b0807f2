"""Imports point one way, and importing the package loads neither backend."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import colibri_jax

PACKAGE = "colibri_jax"
ROOT = Path(colibri_jax.__file__).parent

# What each part of the package may import, besides itself. A part is a module or subpackage directly below the package;
# "" is the package's own front door.
# `generate.protocol` stands apart from the rest of `generate`: it is the interface that both backends implement.
LEAVES = {"errors", "layer_spec", "families", "config", "routing_spec", "tensors", "stats", "quant", "logits", "files", "generate.protocol"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "routing_spec": {"errors"},
    "layer_spec": {"errors", "routing_spec"},
    "families": {"errors", "routing_spec", "layer_spec"},
    "config": {"errors", "routing_spec", "layer_spec", "families"},
    "tensors": {"errors", "config", "routing_spec"},
    "stats": {"errors", "routing_spec"},
    "quant": {"errors"},
    "plots": {"errors"},
    "logits": set(),
    "files": set(),
    "generate.protocol": {"errors", "config", "routing_spec", "stats"},
    "reference": LEAVES,
    "container": LEAVES,
    "engine": LEAVES | {"container"},
    "native": LEAVES | {"container", "engine"},
    "load": LEAVES | {"reference", "container", "engine", "native"},
    "tokenizer": LEAVES,
    "generate": LEAVES | {"reference", "container", "engine", "native", "load", "tokenizer"},
    "compare": LEAVES | {"reference", "container", "engine", "native", "load", "tokenizer", "generate"},
    "quality": LEAVES | {"", "container", "engine", "native", "load", "tokenizer", "generate", "plots"},
    "bench": LEAVES | {"container", "engine", "native", "load", "generate", "plots"},
    "cli": LEAVES
    | {"", "reference", "container", "engine", "native", "load", "tokenizer", "generate", "compare", "quality", "bench", "plots"},
    "": {"errors", "config", "routing_spec", "load"},
}
# What a part may import for annotations (`if TYPE_CHECKING`) or by name (`importlib`) only: the front door names everything
# and loads nothing.
LAZY = {"": {"native", "reference"}}
# The compiled extension belongs to one part.
EXTENSION = "_native"
EXTENSION_USERS = {"engine", "native"}
# jax belongs to one part; nothing else may need it.
JAX_USERS = {"reference"}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Dotted name below the package, and file, of every module; the package itself is ""."""
    for file in sorted(root.rglob("*.py")):
        parts = list(file.relative_to(root).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def part_of(module: str) -> str:
    """The part that a module (dotted, below the package) belongs to."""
    return "generate.protocol" if module == "generate.protocol" else module.split(".", maxsplit=1)[0]


def imports(tree: ast.AST, module: str, is_package: bool, deferred: bool = False) -> Iterator[tuple[str, bool, int]]:
    """Every imported name: (absolute dotted name, for annotations or by name only, line). `from m import n` gives m.n."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, deferred, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = [PACKAGE, *(module.split(".") if module else [])]
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            yield from ((f"{base}.{alias.name}", deferred, node.lineno) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports(ast.Module(node.body, []), module, is_package, True)
            yield from imports(ast.Module(node.orelse, []), module, is_package, deferred)
        else:
            if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                yield from ((str(name), True, node.lineno) for name in names)
            yield from imports(node, module, is_package, deferred)


def violations(root: Path) -> list[str]:
    """Every import that points the wrong way, as "file:line: part imports part"."""
    found = []
    known = {name for name, _ in modules(root)}
    for module, file in modules(root):
        part = part_of(module)
        where = file.relative_to(root)
        if part not in ALLOWED:
            found.append(f"{where}: part {part!r} has no place in the order of imports")
            continue
        tree = ast.parse(file.read_text(encoding="utf8"))
        for name, deferred, line in imports(tree, module, file.name == "__init__.py"):
            top, _, inner = name.partition(".")
            if top in ("jax", "jaxlib") and part not in JAX_USERS:
                found.append(f"{where}:{line}: {part!r} imports jax")
            if top != PACKAGE:
                continue
            if inner.split(".")[0] == EXTENSION:
                if part not in EXTENSION_USERS:
                    found.append(f"{where}:{line}: {part!r} imports the extension")
                continue
            # `from m import n` may name a module or something in one: the longest known prefix decides.
            while inner and inner not in known:
                inner = inner.rpartition(".")[0]
            target = part_of(inner)
            allowed = ALLOWED[part] | (LAZY.get(part, set()) if deferred else set())
            if target not in (part, *allowed):
                found.append(f"{where}:{line}: {part!r} imports {target!r}")
    return found


def test_imports_point_one_way() -> None:
    assert violations(ROOT) == []


def test_order_of_imports_has_no_cycle() -> None:
    order: list[str] = []
    remaining = dict(ALLOWED)
    while remaining:
        ready = sorted(part for part, allowed in remaining.items() if not (allowed & set(remaining)) - {part})
        assert ready, f"cycle among {sorted(remaining)}"
        order += ready
        for part in ready:
            del remaining[part]
    assert order.index("errors") < order.index("quant") < order.index("reference") < order.index("load") < order.index("generate")


def test_reference_and_engine_may_not_name_each_other() -> None:
    assert not ALLOWED["reference"] & {"engine", "native", "container", "load"}
    assert not (ALLOWED["engine"] | ALLOWED["native"] | ALLOWED["container"]) & {"reference", "load"}


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("reference/model.py", "from colibri_jax.engine import session", "'reference' imports 'engine'"),
        ("reference/model.py", "def f():\n    import colibri_jax.native", "'reference' imports 'native'"),
        ("reference/model.py", "from ..container import format", "'reference' imports 'container'"),
        ("engine/session.py", "from colibri_jax import reference", "'engine' imports 'reference'"),
        ("engine/session.py", "if TYPE_CHECKING:\n    from colibri_jax.reference import model", "'engine' imports 'reference'"),
        ("engine/session.py", "try:\n    import jax.numpy\nexcept ImportError:\n    pass", "'engine' imports jax"),
        ("reference/model.py", "from colibri_jax import _native", "'reference' imports the extension"),
        ("reference/model.py", "import importlib\nx = importlib.import_module('colibri_jax.native').y", "'reference' imports 'native'"),
        ("quant.py", "from colibri_jax import config", "'quant' imports 'config'"),
        ("errors.py", "from . import quant", "'errors' imports 'quant'"),
        ("container/format.py", "from colibri_jax.generate import loop", "'container' imports 'generate'"),
        ("__init__.py", "from colibri_jax import native", "'' imports 'native'"),
        ("novelty.py", "import os", "part 'novelty' has no place"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, file: str, source: str, expected: str) -> None:
    for name in ("__init__", "errors", "quant", "config", "native", "load"):
        (tmp_path / f"{name}.py").touch()
    for name in ("reference", "engine", "container", "generate"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    for name in ("reference/model.py", "engine/session.py", "container/format.py", "generate/loop.py", "generate/protocol.py"):
        (tmp_path / name).touch()
    assert violations(tmp_path) == []
    (tmp_path / file).write_text(source, encoding="utf8")
    found = violations(tmp_path)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/session.py", "from colibri_jax.generate.protocol import LanguageModel"),
        ("engine/session.py", "from colibri_jax import _native, quant\nfrom ..container.format import x"),
        ("reference/model.py", "import jax\nfrom . import other\nfrom colibri_jax.errors import ConfigError"),
        ("__init__.py", "if TYPE_CHECKING:\n    from colibri_jax.load import load"),
    ],
)
def test_allowed_import_passes(tmp_path: Path, file: str, source: str) -> None:
    names = ("__init__", "errors", "quant", "load", "engine/__init__", "engine/session", "reference/__init__", "reference/model")
    for name in (*names, "reference/other", "container/__init__", "container/format", "generate/__init__", "generate/protocol"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / file).write_text(source, encoding="utf8")
    assert violations(tmp_path) == []


def loaded_after(statements: str) -> set[str]:
    """Names of all modules in a fresh interpreter after the statements."""
    program = f"{statements}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_no_backend() -> None:
    loaded = loaded_after("import colibri_jax")
    assert PACKAGE in loaded
    assert not loaded & {"jax", "jaxlib", f"{PACKAGE}.{EXTENSION}", f"{PACKAGE}.reference", f"{PACKAGE}.engine", "torch"}


def test_native_engine_works_without_jax() -> None:
    loaded = loaded_after("import colibri_jax\ncolibri_jax.native.select_experts")
    assert f"{PACKAGE}.{EXTENSION}" in loaded
    assert not loaded & {"jax", f"{PACKAGE}.reference"}


def test_reference_works_without_the_extension() -> None:
    loaded = loaded_after("import colibri_jax\ncolibri_jax.reference.select_experts")
    assert "jax" in loaded
    assert not loaded & {f"{PACKAGE}.{EXTENSION}", f"{PACKAGE}.engine"}


def test_public_surface() -> None:
    assert colibri_jax.__all__ == ["ModelConfig", "RouterSpec", "RoutingOptions", "Selection", "load", "native", "reference"]
    assert all(getattr(colibri_jax, name) is not None for name in colibri_jax.__all__)


@pytest.mark.parametrize("before", ["", "import colibri_jax.load\n", "from colibri_jax.load import load\n"])
def test_load_is_the_function_whatever_was_imported_first(before: str) -> None:
    # The submodule has the same name; its first import would put the module in the function's place.
    loaded_after(f"{before}import colibri_jax\nassert colibri_jax.load.__class__.__name__ == 'function', colibri_jax.load")
