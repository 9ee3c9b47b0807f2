"""Every error the package raises: one class per cause, each saying what, where, expected and got.

Native code raises the same classes: its errors carry the class name, and the binding looks it up here.
"""

from __future__ import annotations


class ColibriError(Exception):
    """Base of all errors of this package.

    Args:
        what: the violated rule, in words.
        where: file, tensor, offset, layer, position or option concerned.
        expected: what would have been accepted.
        got: what was found.
    """

    def __init__(self, what: str, *, where: str = "", expected: object = "", got: object = "") -> None:
        self.what, self.where, self.expected, self.got = what, where, expected, got
        parts = [what]
        if where:
            parts.append(f"where: {where}")
        if expected != "":
            parts.append(f"expected: {expected}")
        if got != "":
            parts.append(f"got: {got}")
        super().__init__("; ".join(parts))


class ConfigError(ColibriError):
    """A model configuration contradicts itself or lacks a key."""


class UnsupportedFamilyError(ConfigError):
    """The checkpoint is of a model family that this version does not know."""


class OptionError(ColibriError):
    """An option is outside its domain, or two options exclude each other."""


class FencedOptionError(OptionError):
    """An option whose output cannot be reproduced was used without its explicit flag."""


class NonFiniteLogitError(ColibriError):
    """A logit, of a router or of the vocabulary, is NaN or infinite."""


class NonFiniteActivationError(ColibriError):
    """A value entering a quantised product is NaN or infinite."""


class TokenError(ColibriError):
    """A token id is outside the vocabulary, or a step has no tokens."""


class ContextOverflowError(ColibriError):
    """The step would not fit in the KV cache."""


class PromptTooLongError(ContextOverflowError):
    """The prompt leaves no room in the context; it is never cut."""


class RewindError(ColibriError):
    """More positions were to be dropped than exist."""


class MemoryBudgetError(ColibriError):
    """The memory bound cannot hold dense weights, KV cache and one expert slot per layer."""


class ContainerError(ColibriError):
    """Base of everything that can be wrong with a checkpoint or container on disk."""


class MissingFileError(ContainerError):
    """A file that the directory must hold is absent."""


class HeaderError(ContainerError):
    """A safetensors header is not what the format allows."""


class TruncatedFileError(ContainerError):
    """A file is shorter (or longer) than its header says."""


class OverlapError(ContainerError):
    """Two tensors of one file share bytes."""


class HoleError(ContainerError):
    """A file has bytes that belong to no tensor."""


class MissingTensorError(ContainerError):
    """The configuration asks for a tensor that no file holds."""


class UnexpectedTensorError(ContainerError):
    """A file holds a tensor that the configuration does not explain, or one tensor twice."""


class ShapeError(ContainerError):
    """A tensor has another shape, dtype or byte count than the configuration implies."""


class NonFiniteWeightError(ContainerError):
    """A weight or a scale is NaN or infinite."""


class ScaleRangeError(ContainerError):
    """A scale does not fit the width that a format stores it in."""


class UnknownFormatError(ContainerError):
    """A format tag, version or byte count matches no known weight format."""


class AmbiguousFormatError(UnknownFormatError):
    """Byte counts fit several group sizes and none was named."""


class IncompleteContainerError(ContainerError):
    """The directory is the unfinished output of a conversion."""


class OutputExistsError(ContainerError):
    """The output is a finished container, or belongs to another conversion; it is never overwritten."""


class NoSpaceError(ContainerError):
    """The file system has no room left for the output."""


class ReadError(ContainerError):
    """The operating system failed to deliver bytes that the file should have."""


class UsageFileError(ColibriError):
    """A file of expert usage cannot be read, or belongs to another model."""


class ProfileFileError(ColibriError):
    """A file of budget profiles cannot be read."""


class ProfileModelError(ProfileFileError):
    """A file of budget profiles was measured on another model."""


class MissingProfileError(ColibriError):
    """No budget profile was measured for this model in these steps under this rule."""


class EngineError(ColibriError):
    """The native engine found its own state contradicted; the message is a bug report."""
