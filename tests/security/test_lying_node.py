"""A store node with a right certificate lies to mounts: their programs get what was published, from another
node, or an error, and in time."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.clusters import MIB, Cluster, Plan
from harness.errors import fails_with
from harness.programs import lying_node
from harness.striped import new_content

# So many that each of two nodes is the first to be asked for some of them.
FILES = 4
NO_ERRNO = 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = {"timeout": 2}
    plan = Plan(nodes=2, mounts=2, lease_ttl_s=6, mount_config=config)
    program = lying_node.__file__
    with Cluster(plan, node_program=program, mount_program=program) as made:
        yield made


@contextmanager
def lying(cluster: Cluster, lie: int | str) -> Iterator[None]:
    """Have the first node lie meanwhile."""
    said = cluster.nodes[0].store.with_name(lying_node.LIE)
    said.write_text(str(lie))
    try:
        yield
    finally:
        said.unlink()


@pytest.mark.parametrize(
    "lie", [errno.ENOSPC, errno.EMFILE, NO_ERRNO, lying_node.NEVER, lying_node.BYTE_FOR_BYTE]
)
def test_what_one_node_does_not_give_is_read_from_another(
    cluster: Cluster, here: Path, there: Path, lie: int | str
) -> None:
    for number in range(FILES):
        (here / f"apart{number}").mkdir()
        (here / f"apart{number}" / "small").write_bytes(new_content(1000))
        with (here / f"apart{number}" / "sparse").open("wb") as file:
            file.write(new_content(1000))
            file.seek(MIB)
            file.write(new_content(100_000))
    with lying(cluster, lie):
        for path in here.glob("*/*"):
            assert (there / path.relative_to(here)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        (NO_ERRNO, errno.EIO),
        (0, errno.EIO),
        (errno.ESTALE, errno.ETIMEDOUT),
        (errno.ECANCELED, errno.ECANCELED),
    ],
)
def test_what_one_node_does_not_take_is_an_error_of_its_writer(
    cluster: Cluster, here: Path, lie: int | str, error: int
) -> None:
    (here / "file").write_bytes(b"before")
    with lying(cluster, lie):
        fd = os.open(here / "file", os.O_WRONLY | os.O_TRUNC)
        os.write(fd, b"refused")
        with fails_with(error):
            os.close(fd)
    assert (here / "file").read_bytes() == b"before"
    (here / "file").write_bytes(b"after")
    assert (here / "file").read_bytes() == b"after"


def test_what_one_node_does_not_answer_comes_to_it_by_way_of_another(
    cluster: Cluster, here: Path, there: Path
) -> None:
    with lying(cluster, lying_node.NEVER):
        (here / "file").write_bytes(b"written")
    assert (there / "file").read_bytes() == b"written"
