"""The files that commands are asked to write: one rule for every option that names one.

The suffix says what is written. Folders are made. What could not be written is refused before anything is
measured or played. A file is written beside its name and then renamed: an old one stays until the new one is
whole.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from apex.config import ConfigError
from apex.say import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JSON, MARKDOWN, FILM, PICTURE = (".json",), (".md",), (".gif",), (".png", ".pdf", ".svg")


class OutputFile:
    """The file that ``option`` names; raises :class:`ConfigError` where it could not be written."""

    def __init__(self, option: str, path: Path, suffixes: tuple[str, ...]):
        self.option, self.path = option, Path(path)
        if self.suffix not in suffixes:
            raise ConfigError(f"{option} {path}: the name must end in {' or '.join(suffixes)}")
        try:
            self._target = self.path.resolve()  # a link stays one
            self._check()
        except (OSError, ValueError, RuntimeError) as error:  # NUL in a name, a link to itself
            raise self._refusal(error) from None

    @property
    def suffix(self) -> str:
        """The end of the name, in lower case."""
        return self.path.suffix.lower()

    def write(self, save: Callable[[Path], object], about: str = "") -> None:
        """Let ``save(path)`` write a temporary file, rename it, and say what was written or replaced."""
        aside = self._aside()
        try:
            save(aside)
            replaces = self._target.exists()
            os.replace(aside, self._target)
        except OSError as error:
            raise self._refusal(error) from None
        finally:
            aside.unlink(missing_ok=True)
        say(f"apex: {self.path}: {'replaced' if replaces else 'written'}{about and ', '}{about}")

    def write_text(self, text: str) -> None:
        """Write ``text`` as UTF-8."""
        self.write(lambda path: path.write_text(text, encoding="utf-8"))

    def write_figure(self, figure: Figure, about: str = "") -> None:
        """Write a figure of matplotlib's in the format that the suffix names."""
        self.write(lambda path: figure.savefig(path, format=self.suffix[1:], dpi=150), about)

    def _check(self) -> None:
        if self._target.exists() and not self._target.is_file():
            raise ConfigError(f"{self.option} {self.path} is a folder or a device; name a file")
        self._target.parent.mkdir(parents=True, exist_ok=True)
        if self._target.exists():
            self._target.open("a").close()  # one that is protected is not replaced
        aside = self._aside()
        aside.touch()
        aside.unlink()

    def _aside(self) -> Path:
        return self._target.with_name(f".{uuid.uuid4().hex}{self.suffix}")

    def _refusal(self, error: Exception) -> ConfigError:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        return ConfigError(f"{self.option} {self.path} cannot be written: {why}")


def asked_for(option: str, path: Path | None, suffixes: tuple[str, ...]) -> OutputFile | None:
    """Return the file, or None where the option was not given."""
    return None if path is None else OutputFile(option, path, suffixes)
