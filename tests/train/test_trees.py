"""What is below a directory is known at once, and again by each change of it."""

import os
import random
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.mountpoint import Mount
from hypothesis import given, settings
from hypothesis import strategies as st

from irdmafs.train.trees import Folder, Seen, Trees, look, seen

LONG_S = 30.0


@pytest.fixture
def trees() -> Iterator[Trees]:
    found = Trees()
    yield found
    found.close()


@pytest.fixture
def folders(training_mount: Mount, tmp_path: Path) -> list[Path]:
    found = [training_mount.path / f"{tmp_path.name}-{number}" for number in range(3)]
    for folder in found:
        folder.mkdir()
    return found


def by_path(folder: Folder, above: str = "") -> dict[str, Seen | int]:
    """Return all files and directories."""
    found: dict[str, Seen | int] = {above + name: file for name, file in folder.files.items()}
    for name, below in folder.folders.items():
        found[above + name] = below.ino
        found |= by_path(below, f"{above}{name}/")
    return found


def walked(path: Path) -> dict[str, Seen | int]:
    found: dict[str, Seen | int] = {}
    for above, names, files in os.walk(path):
        for name in names:
            if not os.path.islink(f"{above}/{name}"):
                found[os.path.relpath(f"{above}/{name}", path)] = os.stat(f"{above}/{name}").st_ino
        for name in files:
            file = Path(above, name)
            if not file.is_symlink() and file.stat().st_size:
                found[os.path.relpath(file, path)] = seen(file.stat())
    return found


NAMES = st.sampled_from(["a", "b", "ä", "x" * 200])


@settings(max_examples=15, deadline=None)
@given(
    paths=st.dictionaries(
        st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.booleans(), max_size=8
    )
)
def test_tree_is_what_a_walk_finds(training_mount: Mount, paths: dict[str, bool]) -> None:
    top = training_mount.path / f"walked-{secrets.token_hex(8)}"
    top.mkdir()
    for path, is_file in paths.items():
        below = top / path
        if not any(each.is_file() for each in (below, *below.parents)):
            below.parent.mkdir(parents=True, exist_ok=True)
            if is_file and not below.is_dir():
                below.write_bytes(path.encode())
            else:
                below.mkdir(exist_ok=True)
    (top / "link").symlink_to("a")
    assert by_path(look(top)) == walked(top)


def test_file_that_is_not_published_is_not_there(folders: list[Path]) -> None:
    with (folders[0] / "new").open("wb", buffering=0) as file:
        file.write(b"x")
        assert by_path(look(folders[0])) == {}
    assert list(by_path(look(folders[0]))) == ["new"]


def test_each_publication_is_another_one(folders: list[Path]) -> None:
    found = set()
    for _ in range(5):
        (folders[0] / "file").write_bytes(b"x")
        found.add(look(folders[0]).files["file"])
    assert len(found) == 5


def test_directory_with_too_much_for_an_answer_is_looked_at_in_parts(folders: list[Path]) -> None:
    for number in range(300):
        below = folders[0] / f"{number:0200}"
        below.mkdir()
        (below / "file").write_bytes(b"x")
    assert by_path(look(folders[0])) == walked(folders[0])


def test_very_many_files_and_very_deep_directories_are_not_there(folders: list[Path]) -> None:
    """A thousand directories, each in another, would end who looks by a RecursionError."""
    folders[1].joinpath(*"d" * 100).mkdir(parents=True)
    assert 5 < len(by_path(look(folders[1]))) < 10
    many = folders[0] / "many"
    many.mkdir()
    for number in range(1500):
        (many / f"{number:0100}").touch()
    (folders[0] / "file").write_bytes(b"x")
    assert list(by_path(look(folders[0]))) == ["file", "many"]


def test_change_of_any_directory_ends_a_wait_or_its_time(folders: list[Path], trees: Trees) -> None:
    for folder in folders:
        trees.look(folder)
    trees.wait(0)
    assert not trees.wait(0.01)
    for number, folder in enumerate(folders):
        thread = threading.Thread(target=(folder / str(number)).mkdir)
        thread.start()
        assert trees.wait(LONG_S)
        assert list(trees.look(folder).folders) == [str(number)]
        thread.join()


def test_no_change_is_missed(folders: list[Path], trees: Trees) -> None:
    numbers = random.Random(1)
    for folder in folders:
        trees.look(folder)
    for name in range(200):
        changed = numbers.choice(folders)
        (changed / str(name)).mkdir()
        while str(name) not in trees.look(changed).folders:
            assert trees.wait(LONG_S)


def test_own_change_is_seen_by_looking_again(folders: list[Path], trees: Trees) -> None:
    for name in range(100):
        (folders[0] / str(name)).mkdir()
        assert str(name) in trees.look_again(folders[0]).folders
        assert str(name) in trees.look(folders[0]).folders


def test_error_is_raised_to_who_looks(folders: list[Path], trees: Trees) -> None:
    trees.look(folders[0])
    folders[0].rmdir()
    with pytest.raises(FileNotFoundError):
        for _ in range(100):
            trees.wait(LONG_S)
            trees.look(folders[0])
