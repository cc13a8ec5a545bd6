"""The programs of the field, unmodified: each works on a mount as on any other filesystem."""

import ctypes
import itertools
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import EVERYWHERE
from harness.network import run as run_checked
from harness.processes import Process, TakeProcess

SESSIONS = EVERYWHERE


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def importable(process: TakeProcess, *modules: str) -> Process:
    """A process that has the modules; skips the test where they are not installed."""
    one = process()
    need_modules(one, *modules)
    return one


def need_modules(one: Process, *modules: str) -> None:
    for module in modules:
        try:
            one.do(f"import {module}")
        except ModuleNotFoundError as error:
            pytest.skip(f"not installed: {error.name}")


@pytest.fixture
def sources(folder: Path) -> Path:
    """A small tree of all kinds of files on the mount."""
    top = folder / "sources"
    (top / "deep" / "er").mkdir(parents=True)
    for number in range(30):
        (top / "deep" / f"file{number}").write_bytes(os.urandom(number * 1000))
    (top / "deep" / "er" / "program").write_text("#!/bin/sh\n")
    (top / "deep" / "er" / "program").chmod(0o755)
    os.symlink("deep/file3", top / "symlink")
    os.link(top / "deep" / "file4", top / "hardlink")
    os.mkfifo(top / "fifo")
    os.setxattr(top / "deep" / "file5", "user.dtype", b"int8")
    os.utime(top / "deep" / "file6", ns=(1, 1_234_567_890_123_456_789))
    return top


def describe(top: Path) -> dict[str, object]:
    """Everything that a faithful copy must keep."""
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        times = status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None
        found[str(path.relative_to(top))] = (status.st_mode, status.st_nlink, times, content)
    return found


# -- arrays ----------------------------------------------------------------------------------


def test_numpy_saves_and_loads(folder: Path, process: TakeProcess) -> None:
    one, two = importable(process, "numpy"), importable(process, "numpy")
    path = str(folder / "a.npy")
    one.do("a = numpy.arange(1_000_000, dtype='f4').reshape(1000, 1000); numpy.save(p, a)", p=path)
    assert two.do("b = numpy.load(p); c = numpy.load(p, mmap_mode='r'); int(b[999, 999])", p=path)
    assert two.do("bool((b == c).all()) and b.shape == (1000, 1000)")
    one.do("numpy.save(p, a + 1)", p=path)
    assert two.do("bool((b == c).all())"), "the mapped array changed"
    assert two.do("bool((numpy.load(p) == b + 1).all())", p=path)
    one.do("numpy.savez_compressed(p + '.npz', a=a, b=a[0])", p=path)
    assert two.do("z = numpy.load(p + '.npz'); sorted(z), z['b'].shape", p=path) == (
        ["a", "b"],
        (1000,),
    )


@pytest.mark.parametrize("size", [1000, 3_000_000])
def test_numpy_maps_arrays_in_every_mode(folder: Path, process: TakeProcess, size: int) -> None:
    one, two = importable(process, "numpy"), importable(process, "numpy")
    values = {"p": str(folder / "a.bin"), "size": size}
    one.do("m = numpy.memmap(p, 'f4', 'w+', shape=(size,)); m[:] = 1; m.flush()", **values)
    one.do("m[-1] = 2; m.flush(); del m")
    look = "a = numpy.memmap(p, 'f4', 'r'); (a.shape[0], float(a[0]), float(a[-1]))"
    assert two.do(look, **values) == (size, 1.0, 2.0)
    one.do("m = numpy.memmap(p, 'f4', 'r+'); m[0] = 3; m.flush()", **values)
    assert two.do("b = numpy.memmap(p, 'f4', 'r'); float(b[0])", **values) == 3.0
    one.do("m[0] = 4; m.flush(); del m")
    assert two.do("b = numpy.fromfile(p, 'f4'); float(b[0]), float(b[-1])", **values) == (4.0, 2.0)
    one.do("m = numpy.memmap(p, 'f4', 'c'); m[:] = 9; del m", **values)
    assert two.do("b = numpy.fromfile(p, 'f4'); float(b[0]), float(b[-1])", **values) == (4.0, 2.0)


def test_safetensors(folder: Path, process: TakeProcess) -> None:
    names = ("numpy", "safetensors", "safetensors.numpy")
    one, two = importable(process, *names), importable(process, *names)
    path = str(folder / "model.safetensors")
    one.do("tensors = {f'w{n}': numpy.full((300, n + 1), n, 'f4') for n in range(20)}")
    for version in (0, 1):
        one.do(
            "safetensors.numpy.save_file({k: v + version for k, v in tensors.items()}, p)",
            p=path,
            version=version,
        )
        look = """
with safetensors.safe_open(p, framework='np') as f:
    found = {k: f.get_tensor(k) for k in f.keys()}
sorted((k, v.shape, float(v.min()), float(v.max())) for k, v in found.items())
"""
        expected = sorted((f"w{n}", (300, n + 1), n + version, n + version) for n in range(20))
        assert two.do(look, p=path) == expected
    assert two.do("sorted(safetensors.numpy.load_file(p)) == sorted(found)", p=path)


def test_hdf5(folder: Path, process: TakeProcess) -> None:
    one, two = importable(process, "numpy", "h5py"), importable(process, "numpy", "h5py")
    path = str(folder / "a.h5")
    write = (
        "f = h5py.File(p, mode); f.create_dataset(name, data=numpy.arange(100_000) + n); f.close()"
    )
    look = "f = h5py.File(p, 'r'); r = {k: int(v[-1]) for k, v in f.items()}; f.close(); r"
    one.do(write, p=path, mode="w", name="a", n=0)
    assert two.do(look, p=path) == {"a": 99_999}
    one.do(write, p=path, mode="a", name="b", n=1)
    assert two.do(look, p=path) == {"a": 99_999, "b": 100_000}
    one.do("f = h5py.File(p, 'r+'); f['a'][-1] = 7; f.close()", p=path)
    assert two.do(look, p=path) == {"a": 7, "b": 100_000}
    one.do(write, p=path, mode="w", name="c", n=0)
    assert two.do(look, p=path) == {"c": 99_999}


def test_zarr(folder: Path, process: TakeProcess) -> None:
    one, two = importable(process, "numpy", "zarr"), importable(process, "numpy", "zarr")
    path = str(folder / "a.zarr")
    one.do("z = zarr.open(p, mode='w', shape=(1000, 1000), chunks=(200, 200), dtype='f4')", p=path)
    one.do("z[:] = numpy.arange(1_000_000, dtype='f4').reshape(1000, 1000)")
    look = "z = zarr.open(p, mode='r'); float(z[999, 999]), float(z[500, 500])"
    assert two.do(look, p=path) == (999_999.0, 500_500.0)
    one.do("z = zarr.open(p, mode='r+'); z[500, 500] = -1", p=path)
    assert two.do(look, p=path) == (999_999.0, -1.0)


# -- torch: importing it alone takes seconds -------------------------------------------------


@pytest.fixture(scope="module")
def torch_process() -> Iterator[Process]:
    with Process() as one:
        yield one


@pytest.fixture
def torch(torch_process: Process) -> Iterator[Process]:
    """A process that has torch, and no file of another test."""
    need_modules(torch_process, "torch", "torch.distributed.checkpoint")
    torch_process.do("import warnings; warnings.simplefilter('ignore')")
    yield torch_process
    assert torch_process.reset()


def test_torch_saves_and_loads(folder: Path, torch: Process) -> None:
    path = str(folder / "model.pt")
    torch.do("s = {f'l{n}.w': torch.full((256, 256), float(n)) for n in range(10)}")
    for version in (0, 1):
        torch.do("torch.save({k: v + version for k, v in s.items()}, p)", p=path, version=version)
        for mapped in (False, True):
            found = torch.do(
                "l = torch.load(p, mmap=mapped, weights_only=True)\n"
                "{k: (float(v.min()), float(v.max())) for k, v in l.items()}",
                p=path,
                mapped=mapped,
            )
            assert found == {f"l{n}.w": (n + version, n + version) for n in range(10)}


def test_torch_distributed_checkpoint(folder: Path, torch: Process) -> None:
    path = str(folder / "checkpoint")
    for version in (1.0, 2.0):
        torch.do(
            "torch.distributed.checkpoint.save({'w': torch.full((999, 9), v)}, checkpoint_id=p)",
            p=path,
            v=version,
        )
        torch.do(
            "s = {'w': torch.zeros(999, 9)}; torch.distributed.checkpoint.load(s, checkpoint_id=p)",
            p=path,
        )
        assert torch.do("float(s['w'].min()), float(s['w'].max())") == (version, version)


@pytest.mark.parametrize("journal", ["delete", "truncate", "wal"])
def test_sqlite_of_two_processes(folder: Path, process: TakeProcess, journal: str) -> None:
    writers = [importable(process, "sqlite3") for _ in range(2)]
    connect = "db = sqlite3.connect(p, timeout=30, isolation_level=None)"
    for writer in writers:
        writer.do(connect, p=str(folder / "db"))
    mode = writers[0].do(f"db.execute('pragma journal_mode={journal}').fetchone()[0]")
    if mode != journal:
        pytest.skip(f"SQLite takes {mode} for {journal}: no shared memory map on this filesystem")
    writers[0].do("db.execute('create table t (who integer, n integer)'); None")
    insert = """
for n in range(50):
    db.execute('begin immediate')
    db.execute('insert into t select ?, count(*) from t', (os.getpid(),))
    db.execute('commit')
"""
    for writer in writers:
        writer.start(insert)
    for writer in writers:
        writer.result()
    rows = writers[0].do("[n for n, in db.execute('select n from t order by n')]")
    assert rows == list(range(100)), "a transaction did not see the one before"
    for writer in writers:
        assert writer.do("db.execute('pragma integrity_check').fetchone()") == ("ok",)
        writer.do("db.close()")
    assert process().do(
        f"import sqlite3; {connect}; db.execute('select count(*) from t').fetchone()",
        p=str(folder / "db"),
    ) == (100,)


# -- copying ---------------------------------------------------------------------------------


@needs("tar")
def test_tar_round_trip(folder: Path, sources: Path) -> None:
    (folder / "copy").mkdir()
    run_checked("tar", "--xattrs", "-C", sources, "-czf", folder / "a.tar.gz", ".")
    run_checked("tar", "--xattrs", "-C", folder / "copy", "-xpzf", folder / "a.tar.gz")
    assert describe(folder / "copy") == describe(sources)
    assert os.getxattr(folder / "copy/deep/file5", "user.dtype") == b"int8"
    run_checked("tar", "-C", sources, "-df", folder / "a.tar.gz")


@pytest.mark.parametrize("reflink", ["auto", "never"])
def test_cp_keeps_everything(folder: Path, sources: Path, reflink: str) -> None:
    run_checked("cp", "-a", f"--reflink={reflink}", sources, folder / "copy")
    assert describe(folder / "copy") == describe(sources)
    assert os.getxattr(folder / "copy/deep/file5", "user.dtype") == b"int8"
    run_checked("cp", "--reflink=auto", folder / "copy/deep/file9", folder / "copy/deep/file8")
    assert (folder / "copy/deep/file8").read_bytes() == (sources / "deep/file9").read_bytes()


@needs("rsync")
def test_second_rsync_transfers_nothing(folder: Path, sources: Path) -> None:
    command = ("rsync", "-aHX", "--itemize-changes", f"{sources}/", f"{folder}/copy")
    assert "file9" in run_checked(*command)
    assert describe(folder / "copy") == describe(sources)
    assert run_checked(*command) == ""
    (sources / "deep" / "file9").write_bytes(b"changed")
    assert "file9" in run_checked(*command)
    assert run_checked("rsync", "-aHXc", "--inplace", "--no-whole-file", *command[2:]) == ""
    with open(sources / "deep" / "file29", "r+b") as f:
        f.write(b"changed")
    run_checked("rsync", "-aHXc", "--inplace", "--no-whole-file", *command[2:])
    assert describe(folder / "copy") == describe(sources)


@needs("dd")
@pytest.mark.parametrize("convert", ["fsync", "fdatasync", "notrunc", "sparse"])
def test_dd(folder: Path, convert: str) -> None:
    source, target = folder / "source", folder / "target"
    content = os.urandom(1_000_000) + bytes(500_000)
    source.write_bytes(content)
    target.write_bytes(b"x" * 1_600_000)
    run_checked("dd", f"if={source}", f"of={target}", "bs=64k", f"conv={convert}", "status=none")
    assert target.read_bytes() == content + (b"x" * 100_000 if convert == "notrunc" else b"")
    run_checked(
        "dd", f"if={source}", f"of={target}", "bs=1000", "seek=3", "count=2", "conv=notrunc",
        "status=none",
    )  # fmt: skip
    assert target.read_bytes()[3000:5000] == content[:2000]


@needs("mv", "sed", "sort", "truncate", "install")
def test_small_tools(folder: Path) -> None:
    script = """
seq 5000 > a; sort -R a -o b; sort -n b -o b; cmp a b
sed -i 's/^7$/seven/' b; grep -qx seven b; ! cmp -s a b
truncate -s 10 b; [ $(stat -c %s b) = 10 ]; : > b; [ ! -s b ]
install -m 640 a c; [ $(stat -c %a c) = 640 ]; mv -n c a; mv c d; ! ls c 2> /dev/null
mkdir -p x/y/z; touch x/y/z/f; rm -r x; ln -s a l; readlink l; ln -sf d l; cat l | wc -l
split -l 1000 a part.; cat part.* | cmp - a; tee t1 t2 < a > /dev/null; cmp t1 t2
gzip -k a; gunzip -c a.gz | cmp - a; sha256sum a* > sums; sha256sum --quiet -c sums
"""
    subprocess.run(["bash", "-euc", script], cwd=folder, check=True, timeout=60)


@needs("find", "du")
def test_find_and_du(folder: Path, sources: Path) -> None:
    found = run_checked("find", sources, "-type", "f", "-size", "+20k").split()
    assert len(found) == sum(
        len((sources / f"deep/file{n}").read_bytes()) > 20480 for n in range(30)
    )
    assert run_checked("find", sources, "-samefile", sources / "hardlink").count("\n") == 2
    assert run_checked("find", sources, "-newermt", "2100-01-01") == ""
    apparent = int(run_checked("du", "-sb", "--apparent-size", sources / "deep").split()[0])
    assert apparent >= sum(n * 1000 for n in range(30))
    assert int(run_checked("du", "-sk", sources / "deep").split()[0]) * 1024 >= 400_000


# -- fio, git, inotify -----------------------------------------------------------------------


@needs("fio")
def test_fio_verifies(folder: Path) -> None:
    jobs = [
        (f"--name={engine}-{pattern}", "--stonewall", f"--ioengine={engine}", f"--rw={pattern}")
        for engine, pattern in itertools.product(("psync", "mmap"), ("write", "randwrite"))
    ]
    run_checked(
        "fio", "--name=global", f"--directory={folder}", "--size=2m", "--bs=4k", "--verify=crc32c",
        "--verify_fatal=1", "--do_verify=1", "--fsync=100", "--numjobs=2", "--randseed=1",
        f"--aux-path={folder}", *itertools.chain(*jobs),
    )  # fmt: skip


@needs("git")
def test_git(folder: Path, sources: Path) -> None:
    os.unlink(sources / "fifo")
    git = ("git", "-C", str(sources), "-c", "user.name=t", "-c", "user.email=t@localhost")
    run_checked("git", "init", "-q", sources)
    for number in range(3):
        (sources / "deep" / "file1").write_text(f"change {number}\n")
        run_checked(*git, "add", "-A")
        run_checked(*git, "commit", "-q", "-m", f"change {number}")
    assert run_checked(*git, "status", "--porcelain") == ""
    run_checked(*git, "gc", "-q", "--aggressive", "--prune=now")
    run_checked(*git, "fsck", "--strict")
    run_checked(*git, "checkout", "-q", "HEAD~2")
    assert (sources / "deep" / "file1").read_text() == "change 0\n"
    run_checked("git", "clone", "-q", sources, folder / "clone")
    assert (folder / "clone" / "deep" / "file9").read_bytes() == (
        sources / "deep/file9"
    ).read_bytes()


IN_CREATE, IN_CLOSE_WRITE, IN_MOVED_TO, IN_DELETE = 0x100, 0x8, 0x80, 0x200


@pytest.fixture
def watch(folder: Path) -> Iterator[Callable[[], list[tuple[int, str]]]]:
    """Watches the folder; gives the events so far."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    mask = IN_CREATE | IN_CLOSE_WRITE | IN_MOVED_TO | IN_DELETE
    assert libc.inotify_add_watch(fd, bytes(folder), mask) > 0

    def events() -> list[tuple[int, str]]:
        found = []
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            data = b""
        while data:
            _, kind, _, length = struct.unpack_from("iIII", data)
            found.append((kind, data[16 : 16 + length].rstrip(b"\0").decode()))
            data = data[16 + length :]
        return found

    yield events
    os.close(fd)


def test_watchers_are_told(
    folder: Path, watch: Callable[[], list[tuple[int, str]]], process: TakeProcess
) -> None:
    file, writer = str(folder / "weights"), process()
    writer.do("f = open(file, 'wb'); f.write(b'x'); f.close()", file=file)
    assert watch() == [(IN_CREATE, "weights"), (IN_CLOSE_WRITE, "weights")]
    for mode in ("wb", "r+b", "ab"):
        writer.do("f = open(file, mode); f.write(b'y'); f.close()", mode=mode)
        assert watch() == [(IN_CLOSE_WRITE, "weights")], mode
    with open(file, "rb"):
        writer.do("f = open(file, 'wb'); f.write(b'z'); f.close()")
        assert watch() == [(IN_CLOSE_WRITE, "weights")]
    writer.do("open(file + '.new', 'wb').close(); os.rename(file + '.new', file)")
    assert [event for event in watch() if event[0] == IN_MOVED_TO] == [(IN_MOVED_TO, "weights")]
    writer.do("os.unlink(file)")
    assert (IN_DELETE, "weights") in watch()
