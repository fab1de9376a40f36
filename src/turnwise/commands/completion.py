"""`turnwise completion`: the shell code that completes commands, options of recipes and paths."""

from __future__ import annotations

import argparse

from turnwise.commands.command import Context
from turnwise.errors import ConfigError

__all__ = ["register"]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Print shell code that completes the commands of turnwise, their options, the options of recipes (`train.lr=`), and "
        'paths. For bash, add to ~/.bashrc: eval "$(turnwise completion bash)". For zsh, add to ~/.zshrc, after compinit: '
        'eval "$(turnwise completion zsh)"'
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace, context: Context) -> int:
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise ConfigError(
            "shell completion needs the `argcomplete` package: pip install 'turnwise[completion]'"
        ) from None
    print(shellcode(["turnwise"], shell=options.shell))
    return 0
