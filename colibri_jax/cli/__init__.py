"""The command line: `colibri-jax generate | convert | inspect | compare | quality | bench`.

Commands are imported when they are called, so that `--help` is quick and loads neither jax nor the native extension.
"""

from __future__ import annotations

import errno
import importlib
from typing import Any

import click

from colibri_jax import __version__
from colibri_jax.errors import ColibriError, MemoryBudgetError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

# Name → what it is for; the command itself is the function of that name in the module of that name.
COMMANDS = {
    "generate": "Write an answer to a prompt, streaming experts from disk.",
    "convert": "Turn a Hugging Face checkpoint into an int4 container.",
    "inspect": "Show a model's architecture, formats and sizes.",
    "compare": "Run reference and native side by side.",
    "quality": "Measure what expert budgets cost in quality.",
    "bench": "Measure the engine against the limits of this machine.",
}


class _Failure(click.ClickException):
    """A named error of the package as one line on stderr."""

    exit_code = EXIT_ERROR

    def __init__(self, error: ColibriError) -> None:
        super().__init__(" ".join(f"{type(error).__name__}: {error}".split()))

    def show(self, file: Any = None) -> None:
        click.echo(f"colibri-jax: {self.message}", err=True)


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"colibri_jax.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ColibriError as error:
            raise _Failure(error) from error
        except MemoryError as error:
            raise _Failure(MemoryBudgetError("the process ran out of memory")) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has enough; click ends quietly
                raise
            raise _Failure(
                ColibriError("the operating system refused", where=str(error.filename or "output"), got=error.strerror)
            ) from error
        except KeyboardInterrupt:
            click.echo("\ncolibri-jax: interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="colibri-jax")
def main() -> None:
    """Mixture-of-Experts decoding from disk under an expert budget.

    "colibri-jax COMMAND --help" explains a command; "generate --help" says what an expert budget does.
    """
