"""What operations cost, counted in requests to the daemon: a promise that no timing can blur."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import make_mount
from harness.mountpoint import NOT_BLOCKING, Mount
from harness.processes import TakeProcess

pytestmark = pytest.mark.kernel_session("without passthrough every byte is a request")


@pytest.fixture(scope="module")
def module_mount(session: str) -> Iterator[Mount]:
    """With default options: the price of allow_other is that the kernel checks modes, and asks."""
    with make_mount(session) as mount:
        yield mount


WRITE = """
block = bytes(4 << 20)
with open(file, 'wb', buffering=0) as f:
    for _ in range(size >> 22):
        f.write(block)
"""
# Without the fstat of Python's open(): the kernel forgets the access time at every read.
READ = """
fd = os.open(file, os.O_RDONLY)
while os.readv(fd, [block]):
    pass
os.close(fd)
"""


def blocking(counted: Counter[str]) -> Counter[str]:
    return Counter({kind: n for kind, n in counted.items() if kind not in NOT_BLOCKING})


def test_large_file_costs_few_requests(mount: Mount, folder: Path, process: TakeProcess) -> None:
    file, size, worker = folder / "weights", 256 << 20, process()
    values = {"file": str(file), "size": size}
    with mount.requests() as counted:
        worker.do(WRITE, **values)
    assert counted.total() <= 8, f"writing a new file: {counted}"
    with mount.requests() as counted:
        worker.do(WRITE, **values)
    # The open is sent on to another node: the kernel looks up and opens once more.
    assert blocking(counted).total() <= 11, f"overwriting it: {counted}"
    worker.do("block = bytearray(4 << 20)\n" + READ, **values)
    with mount.requests() as counted:
        worker.do(READ, **values)
    assert blocking(counted).total() <= 1, f"reading it again: {counted}"
    with mount.requests() as counted:
        worker.do(
            "fd = os.open(file, os.O_RDONLY); m = mmap.mmap(fd, size, prot=1); os.close(fd)\n"
            "m[::4096]; m.close()",
            **values,
        )
    assert blocking(counted).total() <= 2, f"mapping it: {counted}"
    os.unlink(file)


def test_small_file_costs_few_requests(mount: Mount, folder: Path, process: TakeProcess) -> None:
    worker = process()
    worker.do("os.chdir(folder); os.stat('.')", folder=str(folder))
    with mount.requests() as counted:
        worker.do(
            "for n in range(100):\n"
            "    fd = os.open(f'{n}', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)\n"
            "    os.write(fd, b'x' * 65536)\n"
            "    os.close(fd)"
        )
    # Each changes the directory, whose mode the next one asks for.
    assert blocking(counted).total() <= 502, f"100 small files: {counted}"


def test_listing_again_asks_no_attributes(mount: Mount, folder: Path, process: TakeProcess) -> None:
    lister = process()
    lister.do(
        "for n in range(1000):\n    with open(f'{d}/{n}', 'wb') as f: f.write(b'x')", d=str(folder)
    )
    listing = "sorted((e.name, e.stat().st_size) for e in os.scandir(d))"
    lister.do(listing, d=str(folder))
    with mount.requests() as counted:
        found = lister.do(listing, d=str(folder))
    assert [size for _, size in found] == [1] * 1000
    asked = {kind: counted[kind] for kind in ("LOOKUP", "GETATTR") if counted[kind] > 1}
    assert not asked, f"ls -l of a directory listed before: {counted}"


def test_missing_names_are_remembered(mount: Mount, folder: Path, process: TakeProcess) -> None:
    looker = process()
    look = "[os.path.exists(f'{d}/missing{n}') for n in range(100)]"
    looker.do(look, d=str(folder))
    with mount.requests() as counted:
        assert looker.do(look, d=str(folder)) == [False] * 100
    assert counted["LOOKUP"] <= 1, f"looking for names known to be missing: {counted}"


def test_memory_of_the_daemon_does_not_grow_with_files(
    mount: Mount, folder: Path, process: TakeProcess
) -> None:
    def resident_bytes() -> int:
        with open(f"/proc/{mount.pid}/statm") as f:
            resident, shared = map(int, f.read().split()[1:3])
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

    worker = process()
    values = {"file": str(folder / "weights"), "size": 256 << 20}
    before = resident_bytes()
    worker.do(WRITE + "block = bytearray(4 << 20)\n" + READ, **values)
    assert resident_bytes() - before < 16 << 20
    os.unlink(folder / "weights")
