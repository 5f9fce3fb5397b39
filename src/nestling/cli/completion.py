"""`nestling completion`: tab completion for a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["command"]


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def command(shell: str) -> int:
    """Print the script that completes commands and options.

    bash and zsh: eval "$(nestling completion bash)" in the start file; fish: save it as
    ~/.config/fish/completions/nestling.fish.
    """
    from nestling.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "nestling", "_NESTLING_COMPLETE").source())
    return 0
