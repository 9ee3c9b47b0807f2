"""`--budget profile:SHARE`: the list of budgets that the container's measured profile gives for a share of the expert bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from colibri_jax.cli.budgets import ProfileShare
from colibri_jax.cli.options import model_directory, routing_from
from colibri_jax.errors import OptionError
from colibri_jax.generate.report import OptionValue

if TYPE_CHECKING:
    from colibri_jax.quality.steps import StepShape
    from colibri_jax.routing_spec import RoutingOptions


class ContainerProfiles:
    """Profiles of one container.

    Args:
        directory: the container.
        group_size: as in `Container.open`.
    """

    def __init__(self, directory: Path, group_size: int | None = None) -> None:
        self._directory, self._group_size = directory, group_size

    @functools.cached_property
    def model(self) -> str:
        """`container_fingerprint`; of a large model it takes seconds."""
        from colibri_jax.container.reader import Container
        from colibri_jax.quality.store import container_fingerprint

        return container_fingerprint(Container.open(self._directory, self._group_size))

    def file(self, named: Path | None) -> Path:
        """The file that was named, else the one beside the container."""
        from colibri_jax.quality.profile_file import PROFILE_FILE

        return named or self._directory / PROFILE_FILE

    def budgets(self, asked: ProfileShare, shape: StepShape, routing: RoutingOptions | None) -> tuple[int, ...]:
        """The list for a share; what it is and where it comes from goes to stderr.

        Raises:
            MissingProfileError, ProfileFileError, ProfileModelError: as `find_profile`.
            OptionError: the profile has no list for so small a share.
        """
        from colibri_jax.quality.profile import best
        from colibri_jax.quality.profile_file import find_profile

        profile = find_profile(self.file(asked.file), self.model, shape, routing)
        chosen = best(profile, asked.share)
        click.echo(
            f"{asked}: {','.join(map(str, chosen.budgets))} by the profile of {profile.describe()} ({profile.tokens} tokens of "
            f"{', '.join(profile.text)}): {chosen.share:.1%} of the expert bytes, and the layers' KLD adds up to {chosen.kld:.4f}",
            err=True,
        )
        return chosen.budgets


def resolve_profile(options: Mapping[str, OptionValue], *, rows: int, chunk: int) -> dict[str, OptionValue]:
    """Options with the profile's list in the place of `--budget profile:SHARE`; as they are where the budget is something else.

    Args:
        rows: positions of a verification step.
        chunk: most positions of a prefill step.

    Raises:
        OptionError: the budget acts in several kinds of steps, or the share is too small.
        MissingProfileError, ProfileFileError, ProfileModelError: as `find_profile`.
    """
    found = dict(options)
    asked = options["budget"].value
    if not isinstance(asked, ProfileShare):
        return found
    from colibri_jax.quality.steps import StepShape

    rule, scopes = routing_from(found | {"budget": OptionValue(0)})
    if len(scopes) != 1:
        what = "a profile is of one kind of steps"
        raise OptionError(what, where=f"--budget {asked}, --budget-scope", expected="one scope", got=", ".join(sorted(scopes)))
    (scope,) = scopes
    group_size = options["group_size"].value if "group_size" in options else None
    profiles = ContainerProfiles(model_directory(options["model_dir"].value), group_size)
    budgets = profiles.budgets(asked, StepShape(kind=scope, rows=rows, chunk=chunk), rule)
    source = options["budget"].source
    found["budget"] = OptionValue(budgets, str(asked) if source in ("flag", "default") else f"{source}, {asked}")
    return found
