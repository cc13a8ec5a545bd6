"""Modules import each other without circles, and none is too long to be read in one go."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Where a directory's modules are imported from.
PLACES = {"irdmafs": "irdmafs", "backend": "irdmafs.backend", "scripts": "", "tests": ""}
LINES_MAX = 500
# Budgets: lines of Python and words of pages. They are lowered when something went. What raised them, after
# what could be made simpler: clones, storing by threads, sending ahead, joint transactions, names by
# directory, and tests of what was found.
PRODUCT_LINES_MAX = 54_740
TEST_LINES_MAX = 55_818
PAGE_WORDS_MAX = 23_999
GENERATED = "_pb2.py"
# From bottom to top: what each room may import is above it in this list.
ROOMS = (
    "_version",
    "",  # irdmafs itself
    "inline",
    "backend",
    "backend.model",
    "backend.unwrap",
    "backend.pauses",
    "backend.process",
    "backend.observe",
    "backend.kv",
    "backend.files",
    "backend.trust",
    "backend.etcd",
    "backend.transport",
    "backend.namespace",
    "backend.cluster",
    "backend.store",
    "backend.node",
    "mount_options",
    "callers",
    "coherence",
    "posix",
    "fuse",
    "mount",
    "client",
    "train",
    "doctor",
    "cli",
    "__main__",
)


def modules() -> dict[str, Path]:
    """Return the project's modules by the names under which they are imported."""
    found = {}
    for place, package in PLACES.items():
        for path in (ROOT / place).rglob("*.py"):
            if not path.name.endswith(GENERATED):
                parts = [package, *path.relative_to(ROOT / place).with_suffix("").parts]
                found[".".join(part for part in parts if part not in ("", "__init__"))] = path
    return found


@cache
def imported(name: str, path: Path) -> list[tuple[str, list[str]]]:
    """Return each module that is imported, anywhere in the file, and the names taken out of it."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found: list[tuple[str, list[str]]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = above if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found.append((source, [alias.name for alias in node.names]))
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Return which of the project's modules each of them imports."""
    found = modules()
    graph: dict[str, set[str]] = {}
    for name, path in found.items():
        graph[name] = set()
        for source, taken in imported(name, path):
            inner = {f"{source}.{one}" for one in taken}
            graph[name] |= inner & found.keys()
            if source in found and not inner <= found.keys():
                graph[name].add(source)
    return graph


def test_modules_do_not_import_each_other_in_circles() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(f"end this circle: {error.args[1]}")


def test_no_module_is_longer_than_500_lines() -> None:
    sizes = {
        name: len(path.read_text().splitlines())
        for name, path in modules().items()
        if name.startswith("irdmafs")
    }
    too_long = {name for name, size in sizes.items() if size > LINES_MAX}
    assert not too_long, f"divide by concept: {too_long}"


def test_code_and_pages_keep_their_budgets() -> None:
    lines = Counter[str]()
    for name, path in modules().items():
        side = "product" if name.startswith("irdmafs") else path.relative_to(ROOT).parts[0]
        lines[side] += len(path.read_text().splitlines())
    assert lines["product"] <= PRODUCT_LINES_MAX
    assert lines["tests"] <= TEST_LINES_MAX
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= PAGE_WORDS_MAX


def test_rooms_import_only_rooms_below_them() -> None:
    places = {room: place for place, room in enumerate(ROOMS)}
    for name, others in imports().items():
        if name.startswith("irdmafs"):
            room = room_of(name)
            above = {other for other in others if places[room_of(other)] > places[room]}
            assert not above, f"{name} imports from rooms above it: {above}"


def room_of(name: str) -> str:
    """Return the room of a module: its folder right below irdmafs/ or backend/, or itself."""
    parts = name.split(".")
    return ".".join(parts[1:3] if parts[1:2] == ["backend"] else parts[1:2])


def test_only_the_portable_session_needs_pyfuse3() -> None:
    """A kernel session is built without it; the doctor asks whether it is there."""
    users = {
        name
        for name, path in modules().items()
        if name.startswith("irdmafs")
        and "pyfuse3" in {source for source, _ in imported(name, path)}
    }
    assert users == {"irdmafs.fuse.portable", "irdmafs.doctor.machine"}
    without = "import sys; sys.modules['pyfuse3'] = None; import irdmafs.mount.daemon"
    subprocess.run([sys.executable, "-c", without], check=True, cwd=ROOT, timeout=60)


def test_transport_knows_its_movers_by_one_list_only() -> None:
    transport = "irdmafs.backend.transport"
    found = imports()
    # A mover is a package with a module of this name.
    movers = [name.rpartition(".")[0] for name in found if name.endswith(".mover")]
    movers.remove(transport)
    for name, others in found.items():
        if name.startswith(transport) and name != f"{transport}.movers":
            known = {mover for mover in movers if any(_is_in(other, mover) for other in others)}
            own = {mover for mover in movers if _is_in(name, mover)}
            assert known <= own, f"{name} imports {known - own}"


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
