"""Builds native/ with its Makefile before packaging; everything else is in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py


class BuildNative(build_py):
    """Runs make in native/, then packages as usual."""

    def run(self):
        subprocess.run(
            ["make", "-C", str(Path(__file__).parent / "native"), f"PYTHON={sys.executable}"], check=True
        )
        super().run()


class BinaryDistribution(Distribution):
    """The wheel holds a shared library, so it belongs to one platform."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildNative}, distclass=BinaryDistribution)
