"""`--budget auto`: the recommended setting of a model that does not fit into this machine's memory, and nothing otherwise.

The choice depends on the machine's memory in all and on the container. What is free, what a cache holds and how fast the disk is do
not enter: the same command gives the same text on the same machine, whatever else runs there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_jax.cli.budgets import AUTO_BUDGET
from colibri_jax.cli.options import BYTES_PER_GB, model_directory, show_value
from colibri_jax.errors import OptionError
from colibri_jax.generate.report import OptionValue
from colibri_jax.routing_spec import RoutingOptions

if TYPE_CHECKING:
    from colibri_jax.quality.recommended import RecommendedSetting

SCOPE_OPTION = "budget_scope"


@dataclasses.dataclass(frozen=True)
class AutoChoice:
    """What `--budget auto` came to.

    Attributes:
        setting: the one to run; None is budget off.
        reason: why, in words.
    """

    setting: RecommendedSetting | None
    reason: str

    def line(self) -> str:
        """Choice and reason."""
        return f"budget auto: {'off' if self.setting is None else self.setting.name} ({self.reason})"


def total_ram_bytes() -> int:
    """Memory of this machine in all, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_budget(directory: Path, total_ram: int, group_size: int | None = None) -> AutoChoice:
    """The setting for a container on a machine with so much memory.

    Args:
        directory: the container. Of a checkpoint that is none nothing is recommended.
        total_ram: bytes of memory that the machine has.
        group_size: as in `Container.open`.

    Raises:
        RecommendedFileError: there is a file of recommended settings, and it is damaged.
        ContainerError: as `Container.open`.
    """
    from colibri_jax.container.inspect import describe
    from colibri_jax.container.reader import Container, is_container
    from colibri_jax.engine.options import DEFAULT_MEMORY_SHARE
    from colibri_jax.quality.recommended import RECOMMENDED_FILE, OtherModelError, fingerprint_of, read_recommended

    if not is_container(directory):
        return AutoChoice(None, "a checkpoint, not a container")
    summary = describe(directory, group_size=group_size)
    experts = len(summary.config.moe_layers) * summary.config.moe.n_experts * summary.slot_bytes
    needed, room = summary.dense_bytes + experts, DEFAULT_MEMORY_SHARE * total_ram
    sizes = f"{_gb(needed)} of weights, {DEFAULT_MEMORY_SHARE:.0%} of {_gb(total_ram)} of memory"
    if needed <= room:
        return AutoChoice(None, f"the model fits: {sizes}")
    # The fingerprint of a large model takes seconds; without the file nobody needs it.
    if not (directory / RECOMMENDED_FILE).is_file():
        return AutoChoice(None, f"no {RECOMMENDED_FILE}, so no setting has a measured quality for this model")
    container = Container.open(directory, group_size)
    try:
        recommended = read_recommended(directory, fingerprint_of(container))
    except OtherModelError:
        return AutoChoice(None, f"{RECOMMENDED_FILE} was measured on another model or by another version")
    setting = None if recommended is None else recommended.best("decode")
    if setting is None:
        return AutoChoice(None, f"{RECOMMENDED_FILE} recommends nothing for decoding")
    setting.routing.check_layers(len(summary.config.moe_layers))
    costs = setting.costs
    return AutoChoice(
        setting,
        f"{sizes}; measured on {setting.text}: {costs.expert_bytes_share.value:.0%} of the expert bytes, KLD {costs.kld.value:.3g}, "
        f"perplexity × {costs.ppl_ratio.value:.4g}, {costs.task_points_lost.value:.2g} task points lost",
    )


def resolve_auto(options: Mapping[str, OptionValue]) -> tuple[dict[str, OptionValue], AutoChoice | None]:
    """Options with the chosen setting in the place of `--budget auto`; as they are where the budget is something else.

    Raises:
        OptionError: an option that was given contradicts the setting.
    """
    found = dict(options)
    if options["budget"].value != AUTO_BUDGET:
        return found, None
    group_size = options["group_size"].value if "group_size" in options else None
    choice = choose_budget(model_directory(options["model_dir"].value), total_ram_bytes(), group_size)
    if choice.setting is None:
        found["budget"] = OptionValue(0, AUTO_BUDGET)
        return found, choice
    wanted = dataclasses.asdict(choice.setting.routing) | {SCOPE_OPTION: (choice.setting.steps,)}
    for name, value in wanted.items():
        given = options[name]
        if name != "budget" and given.source != "default" and given.value != value:
            flag = "--" + name.replace("_", "-")
            raise OptionError(
                "contradicts the setting that --budget auto chose",
                where=flag if given.source == "flag" else given.source,
                expected=f"{flag} {show_value(name, value)}, as {choice.setting.name!r} has it, or another --budget",
                got=show_value(name, given.value),
            )
        if given.source == "default" or name == "budget":
            changed = given.value != value
            found[name] = OptionValue(value, AUTO_BUDGET) if changed else given
    return found, choice


def is_recommended(choice: AutoChoice | None, routing: RoutingOptions) -> bool:
    """Whether these are the options of a setting whose quality was measured."""
    return choice is not None and choice.setting is not None and choice.setting.routing == routing


def _gb(nbytes: float) -> str:
    return f"{nbytes / BYTES_PER_GB:.3g} GB"
