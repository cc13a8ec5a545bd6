"""A mount was stopped for longer than its lease, and a store node on its host has removed what that session
was writing."""

import os
from pathlib import Path

from harness.clusters import Cluster, Plan, StoreNode
from harness.mountpoint import eventually
from harness.programs import hasty_node


def open_in_place(node: StoreNode, path: Path) -> int:
    """Return a descriptor of a file that is written where the node can take it over."""
    opened: list[int] = []
    before = incoming(node)

    def is_there() -> bool:
        path.write_text("before")
        fd = os.open(path, os.O_RDWR)
        if incoming(node) - before:
            opened.append(fd)
        else:
            os.close(fd)
        return bool(opened)

    eventually(is_there, "the node is known")
    return opened[0]


def incoming(node: StoreNode) -> set[str]:
    return set(os.listdir(node.store / "incoming"))


def test_files_that_were_open_for_writing_are_published_opened_and_written_again() -> None:
    """One is not written, one before the mount is stopped, and one after it goes on."""
    plan = Plan(nodes=1, mounts=1, replicas=1, beside={0: 0})
    with Cluster(plan, node_program=hasty_node.__file__) as cluster:
        (mount,), (node,) = cluster.mounts, cluster.nodes
        paths = [mount.path / name for name in ("unwritten", "before", "after")]
        opened = [open_in_place(node, path) for path in paths]
        _, before, after = opened
        try:
            os.pwrite(before, b"BEFORE", 0)
            os.fsync(before)
            mount.pause()
            try:
                eventually(lambda: not incoming(node), "it removes them", within_s=30)
            finally:
                mount.resume()
            os.pwrite(after, b"AFTER", 0)
            os.fsync(after)
        finally:
            for fd in opened:
                os.close(fd)
        assert [path.read_text() for path in paths] == ["before", "BEFORE", "AFTERe"]
        for path in paths:
            for text in ("first", "second"):
                with path.open("r+") as file:
                    file.truncate()
                    file.write(text)
                assert path.read_text() == text
