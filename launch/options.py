"""The options of a command line: written out in full, and refused in one line."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence

from apex.config import ConfigError, nearest
from apex.say import say


class Parser(argparse.ArgumentParser):
    """Takes no abbreviation; raises :class:`ConfigError` for what it does not know, with the nearest option."""

    def __init__(self, *args, **options):
        self._known: list[str] = []
        self._has_commands = False
        super().__init__(*args, allow_abbrev=False, **options)

    def add_argument(self, *names, **options):
        """Declare an argument, as argparse does."""
        self._known += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def add_subparsers(self, **options):
        """Declare commands, each with a parser of this class."""
        self._has_commands = True
        return super().add_subparsers(**options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace=None):
        """Parse; nothing is left over."""
        args = sys.argv[1:] if args is None else list(args)
        for name in self._names(args):
            if name not in self._known:
                self.error(f"unknown option '{name}'; {nearest(name, self._known)}")
        namespace, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unexpected argument '{left[0]}'")
        return namespace, left

    def _names(self, args: list[str]) -> Iterable[str]:
        """Return the long options in ``args`` that are for this parser, not for a command's or for what follows --."""
        own = itertools.takewhile(lambda text: text != "--" and (text.startswith("-") or not self._has_commands), args)
        return [text.partition("=")[0] for text in own if text.startswith("--")]

    def print_help(self, file=None) -> None:
        """Say the help."""
        say(self.format_help(), end="")

    def error(self, message: str):
        """Refuse."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")
