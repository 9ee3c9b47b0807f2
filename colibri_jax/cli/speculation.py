"""Options of drafts, and the drafter that they ask for."""

from __future__ import annotations

from typing import get_args

import click

from colibri_jax.cli.options import Command, apply_all
from colibri_jax.generate.acceptance import Acceptance
from colibri_jax.generate.report import OptionValue
from colibri_jax.generate.speculate import DEFAULT_DEPTH, MOST_DRAFTS, Speculation, UnionVotes


def speculation_options(command: Command) -> Command:
    """Drafts and how they are verified."""
    return apply_all(
        [
            click.option(
                "--draft",
                type=click.Choice(["off", "lookup", "mtp"]),
                default="off",
                show_default=True,
                help="Guess tokens ahead and verify them in one step: by what followed the same tokens before, or by the MTP block.",
            ),
            click.option(
                "--draft-depth",
                type=click.IntRange(1, MOST_DRAFTS),
                default=DEFAULT_DEPTH,
                envvar="DRAFT",
                show_envvar=True,
                show_default=True,
                help="Most tokens guessed at a time.",
            ),
            click.option(
                "--speculation",
                type=click.Choice(get_args(Speculation)),
                default="exact",
                show_default=True,
                help="exact: the text is that without drafts. union is lossy: the rows of a verification share the budget of scope verify.",
            ),
            click.option(
                "--acceptance",
                type=click.Choice(get_args(Acceptance)),
                default="equal",
                show_default=True,
                help="Keep a guess that is the token that would be drawn, or by the classical rule: other text, distributed alike.",
            ),
            click.option(
                "--union-votes",
                type=click.Choice(get_args(UnionVotes)),
                default="uniform",
                show_default=True,
                help="What a row's vote weighs in union mode: alike, or by the rate at which guesses of its depth have stayed so far.",
            ),
            click.option(
                "--pausing/--no-pause", default=True, show_default=True, help="Stop guessing for a while where it costs more than it gains."
            ),
            click.option(
                "--divergence",
                is_flag=True,
                help="After a union answer, run it again exactly and print how far its logits strayed; another pass over the answer.",
            ),
            click.option("--mtp", type=click.IntRange(0, 1), envvar="MTP", hidden=True),
        ],
        command,
    )


def draft_from(options: dict[str, OptionValue]) -> str:
    """The drafter; MTP=1 asks for "mtp" where --draft does not say otherwise. Puts the effective value into `options`."""
    if options["mtp"].value == 1 and options["draft"].source == "default":
        options["draft"] = OptionValue("mtp", "MTP" if options["mtp"].source == "MTP" else "flag")
    return str(options["draft"].value)
