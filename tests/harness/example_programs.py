"""Runs the programs of examples/, small."""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# By module: its package, and how scripts/test is told to install it.
_PACKAGES = {"torch": ("torch", "WITH_TORCH"), "sklearn": ("scikit-learn", "WITH_EXAMPLES")}


def needs(module: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where a module is not installed."""
    package, variable = _PACKAGES[module]
    reason = f"{package} is not installed: {variable}=1 scripts/test"
    return pytest.mark.skipif(find_spec(module) is None, reason=reason)


def run(name: str, *arguments: object, plots: bool = False) -> str:
    """Run an example, and return what it prints. matplotlib, which takes two seconds of a processor, is
    there for a run with `plots` only."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        if not plots:
            Path(folder, "matplotlib.py").write_text("raise ImportError")
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=110,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
