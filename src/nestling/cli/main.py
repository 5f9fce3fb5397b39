"""The `nestling` command: parses, calls one module, and turns errors into exit codes.

Exit codes: 0 done, 1 the run or job failed, 2 usage or configuration, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import sys

import click

from nestling import __version__
from nestling.core.errors import ConfigError, NestlingError

__all__ = ["cli", "main"]

_COMMANDS = {
    "init": ("init", "Write a recipe, an example job and editor schemas into a folder."),
    "run": ("run", "Run the nested loop from a recipe."),
    "cookbook": ("cookbook", "Train with tinker-cookbook's own loop."),
    "job": ("job", "Check, run, show or render one training job."),
    "episode": ("episode", "Play one episode with a policy."),
    "eval-agent": ("eval_agent", "Compare agents on families, with intervals."),
    "baselines": ("baselines", "Scores of the untrained base models."),
    "models": ("models", "List, show, fetch or build base models and agents."),
    "families": ("families", "List, show, check, package and begin task families."),
    "serve": ("serve", "Serve a model through an OpenAI-compatible API."),
    "export": ("export", "Write a run's trained agent as a model folder with a card."),
    "fleet": ("fleet", "Rent, list and end pods; simulate a fleet; cost of a job."),
    "dash": ("dash", "Show runs live in a browser."),
    "track": ("track", "Send a run's metrics to an experiment tracker."),
    "report": ("report", "Write the static HTML report of a run."),
    "bench": ("bench", "Measure jobs and this machine."),
    "ablate": ("ablate", "What each part of an agent's jobs earns."),
    "best-job": ("best_job", "Is one job best for every family?"),
    "redteam": ("redteam", "Attack the machine room; exits 1 when an attack succeeds."),
    "schema": ("schema", "The keys of a recipe or of job.toml, as a schema or a page."),
    "completion": ("completion", "Tab completion for bash, zsh or fish."),
    "doctor": ("doctor", "What is installed, what is missing, and the fix."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, so that --help stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; None when there is none of that name."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"nestling.cli.{_COMMANDS[cmd_name][0]}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest command named on a typo."""
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(
                f"{args[0]!r} is not a command of nestling.{hint} See `nestling --help`."
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, without importing any of them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nestling")
def cli() -> None:
    """Train an AI agent that trains AI: RL inside RL."""


def main() -> None:
    """Entry point: runs the command and exits with its code."""
    try:
        code = cli.main(prog_name="nestling", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except NestlingError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
