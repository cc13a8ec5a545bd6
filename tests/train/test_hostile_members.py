"""Members of a run put anything there: pushes that attack their reader, links, special files.
A check ends with a reason, reducers go on, and nothing outside of the run is touched."""

import errno
import functools
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness.mountpoint import Mount
from harness.training_runs import (
    check,
    newest,
    ones,
    parameters,
    push_and_reduce,
    reduce,
    reduce_until,
    start,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from irdmafs.client._files import open_to_read
from irdmafs.train import Reducer, Refused, TrainError, Worker
from irdmafs.train.directory import ShardFile, TrainDirectory, replace
from irdmafs.train.pushes import inspect
from irdmafs.train.status import report


def entry(first: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def verdict(run: Path, file: Path, name: str = "w.safetensors") -> OSError | TrainError | None:
    """Return why a push is refused."""
    with file.open("rb") as content:
        try:
            check(run, content.fileno(), name)
        except (Refused, TrainError) as error:
            return error
    return None


MALFORMED: dict[str, Callable[[], bytes]] = {
    "garbage": lambda: b"garbage",
    "ones": lambda: b"\xff" * 100,
    "header of 100 MB": lambda: safetensors(b"{" + b" " * 99_999_998 + b"}"),
    "many tensors": lambda: safetensors({str(n): entry(0, 0, [0]) for n in range(100_000)}),
    "metadata of 10 MB": lambda: safetensors({"__metadata__": {"step": "9" * 10_000_000}}),
    "metadata that is no text": lambda: safetensors({"__metadata__": {"step": 1}}),
    "step of many digits": lambda: safetensors({"__metadata__": {"step": "9" * 5000}}),
    "integers": lambda: safetensors({"norm": entry(0, 12, [3], "I32")}, bytes(12)),
    "name with NUL": lambda: safetensors({"no\0rm": entry(0, 12, [3])}, bytes(12)),
    "name of 1 MB": lambda: safetensors({"n" * 1_000_000: entry(0, 12, [3])}, bytes(12)),
    "name with newlines": lambda: safetensors({"a\nversion 9": entry(0, 12, [3])}, bytes(12)),
    "hole": lambda: safetensors({"norm": entry(4, 16, [3])}, bytes(16)),
}


def test_malformed_push_is_refused_in_a_line(run: Path, place: Path) -> None:
    start(run)
    train = TrainDirectory(run)

    def told(name: str) -> bool:
        return f"{name}: " in report(train)

    with Reducer(run) as reducer:
        for number, (kind, make) in enumerate(MALFORMED.items()):
            (place / "push").write_bytes(make())
            error = verdict(run, place / "push")
            assert isinstance(error, Refused), kind
            assert error.errno == errno.EINVAL, kind
            name = f"w{number}.safetensors"
            shutil.copy(place / "push", run / ".train" / "push" / name)
            reduce_until(reducer, functools.partial(told, name), kind)
            [line] = (line for line in report(train).splitlines() if f"{name}: " in line)
            assert len(line) < 600


def test_number_that_is_infinite_in_fp32_is_refused(place: Path) -> None:
    run = start(place / "run")
    save_file({"norm": np.array([1, 1e300, 1], np.float64)}, place / "push")
    assert "infinite" in str(verdict(run, place / "push"))
    save_file(ones(), place / "push", metadata={"weight": "1e39"})
    assert "weight" in str(verdict(run, place / "push"))


# -- what is in the place of a run's files ---------------------------------------------------------


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


PUT: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "huge": huge,
    "garbage": lambda path: path.write_bytes(b"\xff" * 100),
    "deep": lambda path: path.write_bytes(b"lr = " + b"[" * 200_000),
    "empty": Path.touch,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", ["config.toml", "layout.json", "versions/0/version.json"])
def test_check_ends_with_a_reason_whatever_is_in_the_place_of_a_file(
    run: Path, place: Path, file: str
) -> None:
    start(run)
    save_file(ones(), place / "push")
    path = run / ".train" / file
    other = start(run.parent / "other")
    with Worker(other, "w") as worker, Reducer(other) as reducer:
        for number, (what, put) in enumerate(PUT.items(), 1):
            path.rename(run / "was there")
            put(path)
            if file == "config.toml" and what == "empty":
                assert verdict(run, place / "push") is None, "all keys have defaults"
            else:
                with (place / "push").open("rb") as pushed, pytest.raises((OSError, TrainError)):
                    check(run, pushed.fileno(), "w.safetensors")
            push_and_reduce(reducer, worker, ones())
            assert newest(other) == number, what
            (path.rmdir if path.is_dir() else path.unlink)()
            (run / "was there").rename(path)
            assert verdict(run, place / "push") is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("push", "{0}.safetensors"), ("push/{0}@1", "0"), ("workers", "{1}.x"),
        ("refused", "{1}.x"), ("next", "{1}.x"), ("versions", "{1}.x"),
    ],
)  # fmt: skip
def test_reducer_goes_on_whatever_lies_beside_its_files(run: Path, folder: str, name: str) -> None:
    start(run, sync="async")
    train = TrainDirectory(run)
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        for what in ("fifo", "loop", "device", "huge", "garbage", "socket"):
            version = newest(run) + 1
            path = run / ".train" / folder.format(what)
            path.mkdir(exist_ok=True)
            try:
                PUT[what](path / name.format(what, version))
            except OSError:
                assert folder.startswith("push"), "the mount refuses it"
            for _ in range(2):
                push_and_reduce(reducer, worker, ones())
            assert newest(run) == version + 1, what
        if folder.startswith("push"):
            told = re.compile(r"(fifo|socket)\b.*special file")
            reduce_until(reducer, lambda: len({*told.findall(report(train))}) == 2, "it is told")


def test_link_to_a_file_of_somebody_else_is_no_push(run: Path, place: Path) -> None:
    start(run)
    save_file(ones(), place / "secret.safetensors")
    push = TrainDirectory(run).push
    (push / "w.safetensors").symlink_to(place / "secret.safetensors")
    with Reducer(run) as reducer:
        reduce_until(reducer, lambda: "is a link" in report(TrainDirectory(run)), "it is refused")
        assert newest(run) == 0
    assert (push / "w.safetensors").is_symlink()


def test_reasons_are_kept_in_no_directory_that_a_link_leads_to(run: Path, place: Path) -> None:
    start(run)
    victim = place / "victim"
    (victim / "folder").mkdir(parents=True)
    for number in range(50):
        (victim / f"{number}").touch()
    before = sorted(os.listdir(victim))
    refused = TrainDirectory(run).refused
    refused.rmdir()
    refused.symlink_to(victim)
    with Worker(run, "w") as worker, pytest.raises(Refused, match="NaN"):
        worker.push(ones(np.nan))
    assert sorted(os.listdir(victim)) == before


@pytest.mark.parametrize(
    "forged", ['"made_s": 1e300', '"made_s": -1e300', '"made_s": 1, "code": "many"', '"made_s"']
)
def test_forged_refusal_is_passed_over(run: Path, forged: str) -> None:
    start(run)
    refusal = f'{{"path": "forged", "reason": "none", {forged}}}'
    (TrainDirectory(run).refused / "1.host.1").write_text(refusal)
    assert "forged" not in report(TrainDirectory(run))


def test_what_a_link_in_staging_leads_to_is_not_removed_with_it(run: Path, place: Path) -> None:
    start(run)
    victim, link = place / "victim", TrainDirectory(run).staging / "w@1"
    (victim / "folder").mkdir(parents=True)
    for file in (victim / "file", victim / "folder/file"):
        file.write_bytes(b"precious")
    link.symlink_to(victim)
    with Reducer(run) as reducer:
        reduce_until(reducer, lambda: not link.is_symlink(), "the link is gone")
    assert {*victim.rglob("*")} == {victim / name for name in ("file", "folder", "folder/file")}


def test_a_reducer_goes_on_after_a_directory_too_deep_to_be_removed(run: Path, place: Path) -> None:
    start(run)
    top = TrainDirectory(run).staging / "w@1"
    deep = top / "/".join("d" * sys.getrecursionlimit())
    subprocess.run(["mkdir", "-p", deep], check=True)
    with Reducer(run) as reducer:
        reduce_until(reducer, lambda: not top.exists(), "it is put aside")


NAMES = [
    "x" * 243 + ".safetensors", "w.safetensors", "w@1.safetensors", "w@7.safetensors", "w@x.safetensors",
    "@1.safetensors", ".safetensors", "-.safetensors", "w@99999999999999999999.safetensors",
    "w@1@2.safetensors", "w;weight=2.safetensors", "w\n.safetensors", "w@\u0661.safetensors",
    "\udcff.safetensors", "\udcff", "w@01.safetensors", "w:norm.npy", "w", "w@1", "w." + "y" * 250,
]  # fmt: skip


@pytest.mark.parametrize("metadata", [{}, {"worker": "w"}, {"worker": "w", "step": "1"}], ids=str)
def test_push_of_any_name_counts_once_or_is_refused_and_holds_nobody_up(
    run: Path, place: Path, metadata: dict[str, str]
) -> None:
    start(run, sync="async")
    push = TrainDirectory(run).push
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        for name in NAMES:
            save_file(ones(), place / "push", metadata)
            try:
                shutil.copyfile(place / "push", push / name)
            except OSError as error:
                # Refused by the mount, or a name that no filesystem takes.
                assert error.errno in (errno.EINVAL, errno.ESTALE, errno.ENAMETOOLONG)
            step = worker.push(ones())
            reduce(reducer)
            assert TrainDirectory(run).newest_plan().clocks["a"] == step
    updates = TrainDirectory(run).newest_plan().updates
    assert updates > len(NAMES)
    assert parameters(run)["norm"].tolist() == [updates] * 3


def test_push_never_takes_the_name_of_another(run: Path, place: Path) -> None:
    """A file that is its worker's next step, and one that the worker pushes as that step."""
    start(run)
    train = TrainDirectory(run)
    with Reducer(run) as reducer:
        save_file(ones(2), place / "next")
        shutil.copyfile(place / "next", train.push / "a.safetensors")
        reducer._take_parts()
        coordinator = reducer._coordinator
        assert coordinator is not None
        pushed = inspect(train, "a.safetensors")
        assert pushed is not None
        coordinator._pushes["a.safetensors"] = pushed
        save_file(ones(1), place / "first", {"worker": "a", "step": "1"})
        shutil.copyfile(place / "first", train.push / "a@1.safetensors")
        coordinator._settle(pushed, 1)
        assert sorted(os.listdir(train.push)) == ["a.safetensors", "a@1.safetensors"]
    with Reducer(run) as reducer:
        reduce_until(reducer, lambda: newest(run) == 2, "both count")
        assert parameters(run)["norm"].tolist() == [3] * 3


# -- what changes during a run ---------------------------------------------------------------------


def test_configuration_that_became_invalid_refuses_pushes_until_it_is_mended(run: Path) -> None:
    start(run)
    train = TrainDirectory(run)
    good = train.config_path.read_bytes()
    with Reducer(run) as reducer, Worker(run, "w") as worker:
        replace(train.config_path, good.replace(b"bsp", b"bps"))
        with pytest.raises((OSError, TrainError)):
            worker.push(ones())
        with pytest.raises(TrainError, match="sync is bsp"):
            reducer.step()
        replace(train.config_path, good)
        push_and_reduce(reducer, worker, ones())
    assert newest(run) == 1


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("when", ["before it is planned", "afterwards"])
def test_push_changed_after_its_check_holds_nobody_up(run: Path, shards: int, when: str) -> None:
    start(run, shards=shards)
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        a.push(ones())
        b.push(ones())
        train = TrainDirectory(run)
        (push,) = train.push.glob("a@1*")
        aside = run / "aside"
        shutil.copytree(push, aside)
        for file in aside.iterdir():
            content = file.read_bytes().replace(b'"F32"', b'"I32"')
            file.unlink()
            file.write_bytes(content)
        if when == "afterwards":
            reducer._take_parts()
            assert reducer._coordinator is not None
            assert reducer._coordinator.step(train.config(), train.newest_plan(), None)
        os.rename(push, run / "was there")
        os.rename(aside, push)
        if when == "before it is planned":
            a.close()
        reduce_until(reducer, lambda: newest(run) == 1, "the version is made without the push")
        assert parameters(run)["norm"].tolist() == [1] * 3
        assert "has the type" in report(train)


def damaged(content: bytes, changes: list[tuple[int, bytes]], length: int | None) -> bytes:
    """Return bytes that were overwritten in places, and cut or filled up to a length."""
    damaged = bytearray(content)
    for at, new in changes:
        at %= len(damaged)
        damaged[at : at + len(new)] = new
    return bytes(damaged if length is None else damaged[:length].ljust(min(length, 5000), b"\0"))


@pytest.fixture(scope="module")
def good(training_mount: Mount) -> tuple[Path, dict[str, bytes]]:
    """A run, and pushes for it by name."""
    top = training_mount.path / "good"
    top.mkdir()
    run = start(top / "run", shards=2)
    save_file(ones(), top / "push", {"worker": "w", "step": "1"})
    pushes = {"w.safetensors": (top / "push").read_bytes()}
    layout = TrainDirectory(run).layout
    with Worker(run, "w") as worker:
        worker.push(ones())
    for shard in layout.shards:
        (file,) = (run / ".train" / "push").glob(f"w@1*/{shard.name}")
        pushes[f"w@1/{shard.name}"] = file.read_bytes()
    return run, pushes


ODD = (b'"', b"{", b"[", b"-1", b"1e9", b"9" * 21, b"\\ud800", b"null", b"NaN")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    st.integers(0, 2),
    st.lists(
        st.tuples(st.integers(0, 1000), st.binary(min_size=1, max_size=8) | st.sampled_from(ODD)),
        max_size=4,
    ),
    st.none() | st.integers(0, 5000),
)
def test_check_of_any_bytes_ends_with_a_verdict(
    good: tuple[Path, dict[str, bytes]],
    which: int,
    changes: list[tuple[int, bytes]],
    length: int | None,
) -> None:
    run, pushes = good
    name = sorted(pushes)[which]
    fd = os.memfd_create("push")
    try:
        os.write(fd, damaged(pushes[name], changes, length))
        check(run, fd, name)
    except Refused as refused:
        assert refused.errno in (errno.EINVAL, errno.EPERM, errno.ESTALE)
    finally:
        os.close(fd)


def test_a_link_in_the_place_of_a_push_that_was_looked_at_is_not_read(tmp_path: Path) -> None:
    save_file({"slope": np.ones(1, np.float32)}, tmp_path / "secret.safetensors")
    link = tmp_path / "w.safetensors"
    link.symlink_to("secret.safetensors")
    with pytest.raises(FileNotFoundError):
        ShardFile(link)
    with pytest.raises(FileNotFoundError), open_to_read(str(link), os.O_NOFOLLOW):
        pass
