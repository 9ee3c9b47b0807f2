"""The list of native sources matches the tree, and intrinsics and pybind11 stay where they belong."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[1] / "native"
ISA_FOLDERS = ("src/kernels/avx2/", "src/kernels/avx512/", "src/kernels/amx/")
INTRINSIC = re.compile(
    r"immintrin\.h|x86intrin\.h|arm_neon\.h|\b_mm\d*_\w+|\b__m(128|256|512)[id]?\b|\b__mmask\d+\b|\btile(load|store|zero)d?\b|_tile_\w+"
)
WITHOUT = {"table.cpp", "products.h"}  # files of those folders that only declare and list
PYBIND = re.compile(r"pybind11|\bPy[A-Z]\w+|Python\.h")


def sources() -> dict[str, str]:
    """Every C++ file below native, by its path there."""
    return {
        path.relative_to(NATIVE).as_posix(): path.read_text(encoding="utf8")
        for folder in ("src", "include", "tests")
        for path in sorted((NATIVE / folder).rglob("*"))
        if path.suffix in {".cpp", ".h"}
    }


def listed(cmake: str) -> dict[str, list[str]]:
    """Entries of every `set(COLIBRI_…_SOURCES …)` in the text of a CMake file, comments removed."""
    without_comments = re.sub(r"#.*", "", cmake)
    return {name: body.split() for name, body in re.findall(r"set\((COLIBRI_\w*SOURCES)([^)]*)\)", without_comments)}


def list_faults(cmake: str, tree: set[str]) -> list[str]:
    """What is wrong with a list: missing, unknown and repeated entries, and entries in another part's list."""
    lists = listed(cmake)
    counts = Counter(entry for entries in lists.values() for entry in entries)
    faults = [f"not listed: {path}" for path in sorted(tree - counts.keys())]
    faults += [f"does not exist: {path}" for path in sorted(counts.keys() - tree)]
    faults += [f"listed {count} times: {path}" for path, count in sorted(counts.items()) if count > 1]
    for name, entries in lists.items():
        for entry in entries:
            if name != expected_list(entry):
                faults.append(f"{entry} is in {name}, not in {expected_list(entry)}")
    return faults


def expected_list(path: str) -> str:
    """The list that a source belongs to; it decides the compiler's flags."""
    for folder, name in (
        ("kernels/avx2", "AVX2_"),
        ("kernels/avx512", "AVX512_"),
        ("kernels/amx", "AMX_"),
        ("bindings", "BINDING_"),
    ):
        if path.startswith(f"src/{folder}/"):
            return f"COLIBRI_{name}SOURCES"
    return "COLIBRI_SOURCES"


def misplaced(files: dict[str, str], pattern: re.Pattern[str], folders: tuple[str, ...]) -> list[str]:
    """Files outside `folders` whose code (comments and strings aside) matches the pattern."""
    found = []
    for path, text in files.items():
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        if not path.startswith(folders) and pattern.search(code):
            found.append(path)
    return found


def tree() -> set[str]:
    """Every source below native/src."""
    return {path for path in sources() if path.startswith("src/") and path.endswith(".cpp")}


def test_every_source_is_listed_once_in_its_own_list() -> None:
    assert len(tree()) > 10
    assert list_faults((NATIVE / "sources.cmake").read_text(encoding="utf8"), tree()) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("src/kernels/dispatch.cpp", ""), "not listed: src/kernels/dispatch.cpp"),
        (("src/kernels/dispatch.cpp", "# src/kernels/dispatch.cpp"), "not listed: src/kernels/dispatch.cpp"),
        (("src/kernels/dispatch.cpp", "src/kernels/dispatch.cpp src/gone.cpp"), "does not exist: src/gone.cpp"),
        (("src/kernels/avx2/table.cpp", "src/kernels/avx2/table.cpp src/kernels/avx512/table.cpp"), "listed 2 times"),
        (("src/kernels/dispatch.cpp", "src/kernels/dispatch.cpp src/kernels/avx2/table.cpp"), "is in COLIBRI_SOURCES"),
    ],
)
def test_a_wrong_list_is_found(change: tuple[str, str], fault: str) -> None:
    changed = (NATIVE / "sources.cmake").read_text(encoding="utf8").replace(change[0], change[1], 1)
    assert any(found.startswith(fault) or fault in found for found in list_faults(changed, tree()))


def test_intrinsics_stay_in_their_folders() -> None:
    assert misplaced(sources(), INTRINSIC, ISA_FOLDERS) == []
    assert all(
        INTRINSIC.search(text) for path, text in sources().items() if path.startswith(ISA_FOLDERS) and Path(path).name not in WITHOUT
    )


def test_pybind11_stays_in_the_bindings() -> None:
    assert misplaced(sources(), PYBIND, ("src/bindings/",)) == []


@pytest.mark.parametrize(
    ("line", "pattern", "folders"),
    [
        ("#include <immintrin.h>", INTRINSIC, ISA_FOLDERS),
        ("auto x = _mm_pause();", INTRINSIC, ISA_FOLDERS),
        ("__m256i x;", INTRINSIC, ISA_FOLDERS),
        ('asm("tilezero %tmm0");', INTRINSIC, ISA_FOLDERS),
        ("#include <pybind11/numpy.h>", PYBIND, ("src/bindings/",)),
        ("PyObject* object;", PYBIND, ("src/bindings/",)),
    ],
)
def test_a_misplaced_line_is_found(line: str, pattern: re.Pattern[str], folders: tuple[str, ...]) -> None:
    path = "src/routing/planted.cpp"
    assert misplaced({path: f"// fine\n{line}\n"}, pattern, folders) == [path]
    assert misplaced({path: f"// {line}\n"}, pattern, folders) == []
    assert misplaced({folders[0] + "planted.cpp": line}, pattern, folders) == []


@pytest.mark.parametrize("folder", ISA_FOLDERS)
def test_files_of_an_instruction_set_include_no_library_header(folder: str) -> None:
    """A library's inline function compiled for a wide instruction set could be the copy that the linker keeps for everybody."""
    allowed = {
        "<immintrin.h>",
        "<cstdint>",
        '"../parts.h"',
        '"../exp_constants.h"',
        '"lanes.h"',
        '"../avx512/lanes.h"',
        '"scales.h"',
        '"../avx512/scales.h"',
    }
    allowed |= {'"products.h"', '"tiles.h"', '"colibri/kernels.h"'}  # the last is what parts.h includes
    for path, text in sources().items():
        if path.startswith(folder):
            assert set(re.findall(r"#include\s+(\S+)", text)) <= allowed, path
