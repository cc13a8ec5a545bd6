"""Runs the programs of examples/, small, one after the other in one process: torch and scikit-learn take
seconds to import."""

import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.processes import Process

EXAMPLES = Path(__file__).parents[2] / "examples"
# By module: its package, and how scripts/test is told to install it.
_PACKAGES = {"torch": ("torch", "WITH_TORCH"), "sklearn": ("scikit-learn", "WITH_EXAMPLES")}
# Examples fork their workers from a process that has imported these.
_OF_WORKERS = ["irdmafs.train", "torch._dynamo", "torch.distributed.checkpoint"]
_BEGIN = """
import contextlib, importlib, io
from multiprocessing import forkserver
os.chdir(folder)
sys.path.append(examples)
forkserver.set_forkserver_preload(modules)
forkserver.ensure_running()
"""
_RUN = """
if plots: sys.modules.pop('matplotlib', None)
else: sys.modules.setdefault('matplotlib')
with contextlib.redirect_stdout(io.StringIO()) as printed:
    importlib.import_module(name).main(arguments, standalone_mode=False)
printed.getvalue()
"""

# Runs an example with arguments, and returns what it prints. matplotlib, which takes two seconds to import,
# is there from the first run with `plots` on.
Run = Callable[..., str]


def needs(module: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where a module is not installed."""
    package, variable = _PACKAGES[module]
    reason = f"{package} is not installed: {variable}=1 scripts/test"
    return pytest.mark.skipif(find_spec(module) is None, reason=reason)


def examples() -> Iterator[Run]:
    """Yield what runs them."""
    with Process() as process, tempfile.TemporaryDirectory() as folder:
        process.do(_BEGIN, folder=folder, examples=str(EXAMPLES), modules=_OF_WORKERS)

        def run(name: str, *arguments: object, plots: bool = False) -> str:
            process.start(_RUN, name=name, arguments=[*map(str, arguments)], plots=plots)
            return str(process.result(110))

        yield run
