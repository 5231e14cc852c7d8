"""The options of a command line: written out in full, and refused in one line."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from apex.config import ConfigError, nearest
from apex.say import say


class Parser(argparse.ArgumentParser):
    """Takes no abbreviation; raises :class:`ConfigError` for an unknown option and names the nearest."""

    def __init__(self, **options: Any):
        self._known: list[str] = []
        self._has_commands = False
        super().__init__(**{**options, "allow_abbrev": False})

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Declare an argument, as argparse does."""
        self._known += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def add_subparsers(self, **options: Any) -> Any:
        """Declare commands, each with a parser of this class."""
        self._has_commands = True
        return super().add_subparsers(**options)

    def parse_known_args(  # type: ignore[override]  # without overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; nothing is left over."""
        args = sys.argv[1:] if args is None else list(args)
        for name in self._names(args):
            if name not in self._known:
                self.error(f"unknown option '{name}'; {nearest(name, self._known)}")
        parsed, left = super().parse_known_args(args, namespace or argparse.Namespace())
        if left:
            self.error(f"unexpected argument '{left[0]}'")
        return parsed, left

    def _names(self, args: list[str]) -> Iterable[str]:
        """Return the long options in ``args`` for this parser: not those of a command or after --."""
        own = itertools.takewhile(
            lambda text: text != "--" and (text.startswith("-") or not self._has_commands), args
        )
        return [text.partition("=")[0] for text in own if text.startswith("--")]

    def print_help(self, file: object = None) -> None:
        """Say the help."""
        say(self.format_help(), end="")

    def error(self, message: str) -> NoReturn:
        """Refuse."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")
