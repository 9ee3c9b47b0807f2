"""`colibri-jax generate`: from a prompt to streamed text, with the statistics of the run."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console

import colibri_jax
from colibri_jax.cli import EXIT_INTERRUPTED
from colibri_jax.cli.auto_budget import AutoChoice, is_recommended, resolve_auto
from colibri_jax.cli.budget_profile import resolve_profile
from colibri_jax.cli.options import (
    describe_options,
    effective_options,
    engine_options,
    load_arguments,
    model_argument,
    model_directory,
    routing_from,
    routing_options,
    usage_from,
)
from colibri_jax.cli.speculation import draft_from, speculation_options
from colibri_jax.config import ModelConfig
from colibri_jax.container.directory import read_config
from colibri_jax.errors import MissingFileError, OptionError
from colibri_jax.generate.divergence import divergence
from colibri_jax.generate.drafters import Drafter, LookupDrafter, MTPDrafter, check_mtp
from colibri_jax.generate.loop import DEFAULT_PREFILL_CHUNK, GenerateOptions, check_prompt, tokens
from colibri_jax.generate.loop import generate as run_loop
from colibri_jax.generate.notes import Verification, budget_is_on, budget_notes, prefers_cached
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.generate.report import OptionValue, RunReport
from colibri_jax.generate.sampling import SamplingOptions
from colibri_jax.generate.speculate import SpeculationOptions, Speculator
from colibri_jax.routing_spec import RoutingOptions, Scope, check_rows_alone
from colibri_jax.stats import Stats
from colibri_jax.tokenizer import ChatTokenizer

EPILOG = """\b
What an expert budget does
  Every position of a step picks its own experts; --budget N lets a layer use at
  most N distinct ones in that step, so that less is read from disk. The experts
  with the largest summed weight stay, the others are dropped from every position
  that picked them. A decode step has one position, so N below the model's top-k
  cuts it. It is off unless asked for.
\b
What it can do to a position
  A cut changes the answer. What is left of a position is weighted up to full
  scale again where the model normalises (--denominator survivors). Where many
  positions share a step, policy "aggregate" can take all experts of one: that
  position is emptied and gets its shared experts only. Emptied positions are
  counted. In scope prefill the cut also marks the KV cache, so everything that
  follows, and --prefill-chunk becomes part of the result.
  What each policy costs is measured on the small model that ships, and says
  little of others: `colibri-jax quality` measures it on yours.
\b
What --budget auto chooses
  Off where all weights fit into the share of this machine's memory that the
  engine takes by itself. Else the first setting for decoding of the file
  recommended.json beside the model, with all of its options, or off where there
  is none for this very model. What is free or fast does not matter, and the
  choice is printed with its reason.
\b
Policies
  aggregate     the N experts with the largest sum of votes over the step
  floor         every position's best (--floor) first, then by votes up to N
  substitute    as floor; a position that lost experts picks others of the set
  coverage      as floor, until --coverage of the votes is held, or N experts
  per_position  every position by itself keeps its best N
  resident      cached experts always, the rest by votes (--allow-irreproducible)
  cache_route   no budget: a position's best --route-top stay, then come cached
                experts among its best --route-within, then the others, as many
                as it had (--allow-irreproducible). The statistics say how many
                experts were swapped for cached ones
\b
Drafts
  With --draft, some tokens are guessed and verified in one step. --speculation
  exact routes each verified row as decoding it would, so text and logits stay
  as they are, bit for bit. --speculation union is LOSSY: the verified rows share
  one budget (--budget-scope verify), and the text becomes another. Guessing
  pauses where it loses: judged by time in exact mode, by counts of experts and
  rows in union mode, so that a run repeats.
\b
Environment
  SNAP, PROMPT, NGEN, EXPERT_BUDGET, TOPK, TOPP, CAP, RAM_GB, READER, PIPE,
  PILOT and DRAFT (the depth) are defaults for MODEL_DIR and the flags; a flag
  wins. MTP=1 means --draft mtp, MTP=0 nothing.
"""


@click.command(epilog=EPILOG)
@model_argument
@click.option("--prompt", envvar="PROMPT", show_envvar=True, help="What the model is asked.")
@click.option("--system", help="System message before the prompt.")
@click.option("--raw", is_flag=True, help="No chat template: the model's prefix, then the prompt as a text to continue.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=64, envvar="NGEN", show_envvar=True, show_default=True, help="Longest answer."
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option(
    "--top-p", type=float, default=1.0, show_default=True, help="Draw from the most probable tokens that hold this share; 1 is off."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Key of every draw.")
@routing_options
@click.option(
    "--prefill-chunk",
    type=click.IntRange(min=1),
    default=DEFAULT_PREFILL_CHUNK,
    show_default=True,
    help="Most prompt tokens in one step.",
)
@click.option(
    "--backend", type=click.Choice(["native", "reference"]), default="native", show_default=True, help="Which implementation runs."
)
@engine_options
@speculation_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with everything instead of the text.")
@click.pass_context
def generate(ctx: click.Context, /, **_: Any) -> None:
    """Write an answer to a prompt with the model in MODEL_DIR (default: SNAP, else the model that ships).

    Text goes to stdout as it comes; effective options, notes and statistics go to stderr. Ctrl-C ends the answer and
    still prints its statistics.
    """
    options, auto = resolve_auto(effective_options(ctx))
    options = resolve_profile(options, rows=1 + options["draft_depth"].value, chunk=options["prefill_chunk"].value)
    draft = draft_from(options)
    value = {name: option.value for name, option in options.items()}
    routing, scopes = routing_from(options)
    sampling = SamplingOptions(temperature=value["temperature"], top_p=value["top_p"], seed=value["seed"])
    directory = model_directory(value["model_dir"])
    options["model_dir"] = dataclasses.replace(options["model_dir"], value=str(directory))
    config = _read_config(directory)
    tokenizer = ChatTokenizer.from_directory(directory)
    prompt_ids = _encode(tokenizer, value)
    check_prompt(prompt_ids, vocab_size=config.vocab_size, free_positions=config.max_positions)
    run = GenerateOptions(
        max_new_tokens=value["max_new_tokens"], prefill_chunk=value["prefill_chunk"], sampling=sampling, stop_ids=tokenizer.stop_ids
    )
    speculation = SpeculationOptions(
        depth=value["draft_depth"],
        speculation=value["speculation"],
        acceptance=value["acceptance"],
        union_votes=value["union_votes"],
        pausing=value["pausing"],
    )
    if draft == "mtp":
        check_mtp(config)
    if value["divergence"] and (draft == "off" or speculation.speculation == "exact"):
        expected = "together with --draft and --speculation union"
        raise OptionError("nothing strays from exact decoding", where="--divergence", expected=expected, got=f"--draft {draft}, exact")
    if draft != "off" and speculation.speculation == "exact":
        check_rows_alone(routing)
    notes = _notes(config, routing, scopes, options, auto, largest_prefill_step=min(run.prefill_chunk, len(prompt_ids)))
    drafting = {"draft_depth", "speculation", "acceptance", "pausing", "divergence", "union_votes"}
    hidden = {"prompt", "system", "mtp", "as_json"} | (drafting if draft == "off" else set()) | (set() if value["raw"] else {"raw"})
    shown = {name: option for name, option in options.items() if name not in hidden}
    click.echo(describe_options(shown), err=True)
    for note in notes:
        click.echo(note, err=True)

    # The KV cache holds what this run can reach, not the model's whole context.
    context = min(config.max_positions, len(prompt_ids) + run.max_new_tokens)
    usage = usage_from(options, config)
    arguments = load_arguments(options)
    if usage is not None and value["pin"]:
        arguments["pinned"] = usage.hottest(value["pin"])
    if draft == "mtp":
        arguments["mtp"] = True
    lm = colibri_jax.load(directory, routing=routing, budget_scopes=scopes, context_positions=context, **arguments)
    click.echo(_describe_engine(lm.stats), err=True)
    chosen_from: dict[int, npt.NDArray[np.float32]] | None = {} if value["divergence"] else None
    speculator = None
    if draft != "off":
        keep = None if chosen_from is None else chosen_from.__setitem__
        speculator = Speculator(lm, _drafter(draft, lm, sampling, speculation), speculation, on_logits=keep)
    report = _run(
        lm,
        tokenizer,
        prompt_ids,
        run,
        options=options,
        notes=notes,
        stream=not value["as_json"],
        speculator=speculator,
        chosen_from=chosen_from,
    )
    _print_report(report, as_json=value["as_json"])
    if usage is not None:
        from colibri_jax.engine.session import NativeModel

        assert isinstance(lm, NativeModel)  # usage_from saw to it
        usage.plus(lm.usage).write(value["usage_file"])
    if report.generation.stop_reason == "interrupted":
        ctx.exit(EXIT_INTERRUPTED)


def _run(
    lm: LanguageModel,
    tokenizer: ChatTokenizer,
    prompt_ids: list[int],
    run: GenerateOptions,
    *,
    options: Mapping[str, OptionValue],
    notes: tuple[str, ...],
    stream: bool,
    speculator: Speculator | None,
    chosen_from: Mapping[int, npt.NDArray[np.float32]] | None,
) -> RunReport:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to lose the answer
    decoder = tokenizer.stream()
    pieces: list[str] = []

    def emit(piece: str) -> None:
        pieces.append(piece)
        if stream and piece:
            sys.stdout.write(piece)
            sys.stdout.flush()

    make = tokens if speculator is None else speculator.tokens
    generation = run_loop(lm, prompt_ids, run, on_token=lambda token: emit(decoder.push(token)), make=make)
    emit(decoder.flush())
    if stream:
        click.echo()
    stats = lm.stats  # of the run: looking for divergence is none of it
    strayed = None
    if chosen_from is not None and generation.stop_reason != "interrupted":
        strayed = divergence(lm, generation.prompt_tokens, generation.all_tokens, chosen_from, run.sampling)
    return RunReport(
        generation=generation,
        text="".join(pieces),
        stats=stats,
        routing=lm.routing,
        budget_scopes=lm.budget_scopes,
        options=options,
        notes=notes,
        speculation=None if speculator is None else speculator.stats,
        divergence=strayed,
    )


def _drafter(name: str, lm: LanguageModel, sampling: SamplingOptions, speculation: SpeculationOptions) -> Drafter:
    return LookupDrafter() if name == "lookup" else MTPDrafter(lm, sampling, independent=speculation.acceptance == "resample")


def _print_report(report: RunReport, *, as_json: bool) -> None:
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    console.print(report.table())
    console.print(f"{len(report.generation.tokens)} new tokens; ended by {report.generation.stop_reason.replace('_', ' ')}", markup=False)
    if report.speculation is not None:
        click.echo("\n".join(report.speculation.lines()), err=True)
    if report.divergence is not None:
        click.echo(report.divergence.line(), err=True)
    line = report.budget_line()
    if line is not None:
        click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps(report.to_json(), ensure_ascii=False))


def _notes(
    config: ModelConfig,
    routing: RoutingOptions,
    scopes: frozenset[Scope],
    options: Mapping[str, OptionValue],
    auto: AutoChoice | None,
    *,
    largest_prefill_step: int,
) -> tuple[str, ...]:
    value = {name: option.value for name, option in options.items()}
    verification = None if value["draft"] == "off" else Verification(value["speculation"], 1 + value["draft_depth"])
    notes = [] if auto is None else [auto.line()]
    measured = is_recommended(auto, routing)
    notes += budget_notes(config, routing, scopes, largest_prefill_step=largest_prefill_step, verification=verification, measured=measured)
    if verification is None:
        for name in ("draft_depth", "speculation", "acceptance", "union_votes", "pausing"):
            if options[name].source == "flag":
                notes.append(f"no effect: --{'no-pause' if name == 'pausing' else name.replace('_', '-')} without --draft")
    elif verification.speculation == "exact":
        if options["union_votes"].source == "flag":
            notes.append("no effect: --union-votes with --speculation exact")
    else:
        notes.append("lossy: the rows of a verification share a budget (--speculation union), so the text is not that without drafts")
    if not prefers_cached(routing):
        for name in ("route_top", "route_within"):
            if options[name].source == "flag":
                notes.append(f"no effect: --{name.replace('_', '-')} without --policy cache_route")
    if not budget_is_on(routing):
        for name in ("budget_scope", "policy", "denominator", "vote"):
            if options[name].source == "flag":
                notes.append(f"no effect: --{name.replace('_', '-')} without --budget")
    elif "prefill" in scopes:
        notes.append(
            f"the budget acts on prefill: steps of {options['prefill_chunk'].value} positions (--prefill-chunk) are part of the result"
        )
    if options["temperature"].value == 0.0:
        for name in ("top_p", "seed"):
            if options[name].source == "flag":
                notes.append(f"no effect: --{name.replace('_', '-')} without --temperature (greedy)")
    return tuple(notes)


def _encode(tokenizer: ChatTokenizer, value: Mapping[str, Any]) -> list[int]:
    prompt, system = value["prompt"], value["system"]
    if not prompt:
        raise OptionError("nothing to answer", where="--prompt or PROMPT", expected="a text", got="nothing")
    for name in ("prompt", "system"):
        try:
            (value[name] or "").encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are no text arrive as lone surrogates
            raise OptionError("not UTF-8", where=f"--{name}", expected="text", got=f"a stray byte at character {error.start}") from error
    if value["raw"]:
        if system is not None:
            raise OptionError("a raw prompt has no roles", where="--system", expected="not together with --raw", got="both")
        return tokenizer.encode_raw(prompt)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.encode_chat([*messages, {"role": "user", "content": prompt}])


def _read_config(directory: Path) -> ModelConfig:
    """The model's description, before anything of its weights is touched."""
    file = directory / "config.json"
    if not file.is_file():
        raise MissingFileError("the directory holds no model", where=str(directory), expected="config.json", got="no such file")
    return read_config(directory)[0]


def _describe_engine(stats: Stats) -> str:
    """What the model effectively runs with, as it says itself after loading."""
    parts = [f"backend={stats.backend}", f"precision={stats.precision}"]
    for name, value in (("isa", stats.isa), ("reader", stats.reader), ("threads", stats.threads)):
        if value:
            parts.append(f"{name}={value}")
    if stats.cache_experts_per_layer:
        parts.append(f"cache={stats.cache_experts_per_layer} experts per layer of {stats.expert_bytes / 1e6:.3g} MB")
    if stats.pinned_experts:
        parts.append(f"pinned={stats.pinned_experts} experts of all layers")
    for name, n_bytes in (("dense", stats.dense_bytes), ("kv", stats.kv_cache_bytes), ("ram", stats.ram_bytes)):
        if n_bytes:
            parts.append(f"{name}={n_bytes / 1e9:.3g} GB" if n_bytes >= 1e9 else f"{name}={n_bytes / 1e6:.4g} MB")
    if stats.ram_bytes < stats.asked_ram_bytes:
        parts[-1] += f" (asked for {stats.asked_ram_bytes / 1e9:.3g} GB; no more is free)"
    return "running: " + "  ".join(parts)
