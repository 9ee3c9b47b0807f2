"""Results of windows, kept in files, so that an interrupted measurement goes on where it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax import __version__
from colibri_jax.container.reader import Container
from colibri_jax.errors import ColibriError
from colibri_jax.quality.costs import StepCosts
from colibri_jax.quality.statistics import TokenResults

SUFFIX = ".npz"


@dataclasses.dataclass(frozen=True, eq=False)
class GroupResult:
    """What one window gave in one group of positions. The base has no tokens: there is nothing to compare it with."""

    tokens: TokenResults
    costs: StepCosts


WindowResult = dict[str, GroupResult]
"""By group of positions."""


class StoredResultError(ColibriError):
    """A kept result cannot be read; deleting the file has the window measured again."""


def fingerprint(*parts: Any) -> str:
    """A short hash of things that JSON can hold, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def model_fingerprint(container: Container, backend: str, precision: str) -> str:
    """Of everything that results depend on but the tokens and the setting: the model, how it is computed, and this version."""
    return fingerprint(*_identity(container), backend, precision, __version__)


def container_fingerprint(container: Container) -> str:
    """Of the model alone: for what stays with it, whoever computes it."""
    return fingerprint(*_identity(container))


def _identity(container: Container) -> tuple[Any, ...]:
    """The configuration, every tensor's format and size, and a hash of the values of the vectors (norms and biases, which no training
    leaves as they were; reading all weights of a large model would take longer than measuring it)."""
    entries = {role: (entry.format.tag, list(entry.shape), entry.total_bytes) for role, entry in container.entries.items()}
    values = hashlib.sha256()
    for role, entry in container.entries.items():
        if entry.format.bits == 32 and len(entry.shape) == 1:
            vector = container.read(role)
            assert isinstance(vector, np.ndarray)
            values.update(vector.tobytes())
    return container.raw_config, entries, values.hexdigest()


class ResultStore:
    """Files of a directory, one per window and setting; without a directory nothing is kept.

    Args:
        directory: made where it does not exist.
        model: `model_fingerprint`.
    """

    def __init__(self, directory: Path | None, model: str = "") -> None:
        self._directory, self._model = directory, model

    def get(self, setting: Any, window: npt.NDArray[np.int32]) -> WindowResult | None:
        """What was kept, or None.

        Args:
            setting: what was measured, as something that JSON can hold.
            window: int32 [n + 1] tokens.

        Raises:
            StoredResultError: the file is damaged.
        """
        file = self._file(setting, window)
        if file is None or not file.is_file():
            return None
        try:
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                return _unpacked({name: arrays[name] for name in arrays.files})
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise StoredResultError("a kept result cannot be read", where=str(file), expected="one that this wrote", got=error) from error

    def put(self, setting: Any, window: npt.NDArray[np.int32], result: WindowResult) -> None:
        """Keep a result: a whole file, or none."""
        file = self._file(setting, window)
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        with part.open("wb") as out:
            np.savez(out, **_packed(result))
        os.replace(part, file)

    def _file(self, setting: Any, window: npt.NDArray[np.int32]) -> Path | None:
        if self._directory is None:
            return None
        tokens = hashlib.sha256(np.ascontiguousarray(window, np.int32).tobytes()).hexdigest()[:16]
        return self._directory / fingerprint(self._model, setting) / f"{tokens}{SUFFIX}"


def _packed(result: WindowResult) -> dict[str, Any]:
    return {
        f"{group}/{part}/{field.name}": np.asarray(getattr(values, field.name))
        for group, both in result.items()
        for part, values in (("tokens", both.tokens), ("costs", both.costs))
        for field in dataclasses.fields(values)
    }


def _unpacked(arrays: dict[str, Any]) -> WindowResult:
    groups = dict.fromkeys(name.split("/")[0] for name in arrays)
    result = {}
    for group in groups:
        tokens, costs = (
            {field.name: arrays[f"{group}/{part}/{field.name}"] for field in dataclasses.fields(kind)}
            for part, kind in (("tokens", TokenResults), ("costs", StepCosts))
        )
        costs = {name: int(value) if value.ndim == 0 else value for name, value in costs.items()}
        result[group] = GroupResult(TokenResults(**tokens), StepCosts(**costs))
    return result
