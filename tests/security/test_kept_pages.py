"""Pages that a user keeps of a file which he may read never show a file that he may not read.

A store node uses the memory of superseded versions again, also of files that programs on its host have
read, if these promise to keep no references to their pages. Not everybody is believed.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.clusters import MIB, Cluster, Plan
from harness.processes import AS_NOBODY, Process

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="takes another user"),
]

SIZE = MIB
KEPT_BYTES = 16384
VERSIONS = 8
KEEP_PAGES = """
import os
os.getxattr(promised, "user.irdmafs.keeps_no_pages")
file = os.open(opened, os.O_RDONLY)
kept, end = os.pipe()
os.splice(file, end, size)
os.close(file)
"""


@pytest.fixture(scope="module")
def roots() -> Iterator[tuple[Path, Path]]:
    """A mount on a host of its own, and one on that of the only store node, which all users may enter."""
    with Cluster(Plan(nodes=1, mounts=1, replicas=1)) as cluster:
        mount = cluster.add_mount("-o", "allow_other", beside=cluster.nodes[0])
        for directory in (cluster.directory, mount.path.parent):
            directory.chmod(0o755)
        yield cluster.mounts[0].path, mount.path


@pytest.mark.parametrize("view", ["", ".irdmafs-private"])
def test_pages_of_public_file_never_show_a_private_one(roots: tuple[Path, Path], view: str) -> None:
    there, here = (root / f"folder{view}" for root in roots)
    there.mkdir()
    public, private = there / "public", there / "private"
    public.write_bytes(b"p" * SIZE)
    private.write_bytes(b"")
    private.chmod(0o600)
    names = {"promised": str(here / "public"), "opened": str(here / view / "public")}
    with Process(AS_NOBODY) as stranger:
        stranger.do(KEEP_PAGES, size=KEPT_BYTES, **names)
        public.write_bytes(b"q" * SIZE)
        for _ in range(VERSIONS):
            private.write_bytes(b"s" * SIZE)
        assert stranger.do("os.read(kept, size)") == b"p" * KEPT_BYTES
