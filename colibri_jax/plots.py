"""Plots, for where a person would rather look than read. They are drawn by matplotlib, the optional extra `plot`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from colibri_jax.errors import OptionError

FORMATS = (".svg", ".png", ".pdf")


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines over one horizontal axis.

    Attributes:
        x: numbers, or names that stand at equal distances.
        lines: values by the line's name, one for each x.
        own_x: numbers of lines that have others than the panel's, by name.
        log_y: a logarithmic vertical axis; else it begins at 0.
    """

    x_label: str
    y_label: str
    x: Sequence[float] | Sequence[str]
    lines: Mapping[str, Sequence[float]]
    own_x: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    log_y: bool = False


def check_plot(path: Path) -> None:
    """See that a plot could be written, before the work that it shows.

    Raises:
        OptionError: matplotlib is not installed, or the file's ending is none of `FORMATS`.
    """
    if path.suffix not in FORMATS:
        raise OptionError("unknown kind of picture", where=str(path), expected=" or ".join(FORMATS), got=path.suffix or "no ending")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise OptionError("plots need matplotlib", where=str(path), expected="pip install 'colibri_jax[plot]'", got=str(error)) from error


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write panels beside each other; the file's ending says how.

    Raises:
        OptionError: as `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 4.0), layout="constrained")
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, values in panel.lines.items():
            axes.plot(list(panel.own_x.get(name, panel.x)), list(values), marker="o", label=name)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        if panel.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
