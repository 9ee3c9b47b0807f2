"""What both kinds of model directories share: config.json, the files carried along, the safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from colibri_jax.config import ModelConfig
from colibri_jax.container.format import FileIndex, StoredTensor, read_index
from colibri_jax.errors import ConfigError, MissingFileError, ReadError, UnexpectedTensorError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
CARRIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    GENERATION_FILE,
    "chat_template.jinja",
    "chat_template.json",
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError("no such file", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("not valid JSON", where=str(path), got=error) from error
    except OSError as error:
        raise ReadError("cannot read a file", where=str(path), got=error.strerror) from error
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object", where=str(path), got=type(value).__name__)
    return value


def read_config(directory: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """`config.json` as a model configuration, and as it is."""
    raw = read_json(directory / CONFIG_FILE)
    return ModelConfig.from_hf(raw), raw


def carried_files(directory: Path) -> dict[str, Path]:
    """Tokenizer, generation and chat template files that a directory has, by name."""
    return {name: directory / name for name in CARRIED_FILES if (directory / name).is_file()}


def generation_config(directory: Path) -> dict[str, Any]:
    """`generation_config.json`, empty where there is none."""
    path = directory / GENERATION_FILE
    return read_json(path) if path.is_file() else {}


def index_files(paths: Iterable[Path]) -> tuple[dict[str, StoredTensor], list[FileIndex]]:
    """All tensors of several files by name, and the files.

    Raises:
        UnexpectedTensorError: two files hold one tensor.
    """
    tensors: dict[str, StoredTensor] = {}
    files = [read_index(path) for path in paths]
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise UnexpectedTensorError("one tensor in two files", where=name, expected=tensors[name].path.name, got=file.path.name)
            tensors[name] = tensor
    return tensors, files
