"""What holds of every namespace whenever no operation is under way."""

from collections.abc import Iterator

from irdmafs.backend.namespace import ROOT_INO, Inode, Namespace


def walk(namespace: Namespace, ino: int = ROOT_INO) -> Iterator[tuple[bytes, Inode]]:
    """Every path and its inode, from the root."""
    left = [(b"", ino)]
    while left:
        path, ino = left.pop()
        inode = namespace.inodes[ino]
        yield path or b"/", inode
        if inode.is_dir:
            left += ((path + b"/" + name, child) for name, child in namespace.children(ino))


def recount(namespace: Namespace, directory: int) -> tuple[int, int]:
    """How many inodes there are below a directory, and the bytes allocated for them."""
    below = {inode.ino: inode for _, inode in walk(namespace, directory)}
    del below[directory]
    return len(below), sum(512 * inode.blocks for inode in below.values() if inode.is_file)


def check(namespace: Namespace, nameless: frozenset[int] = frozenset()) -> None:
    """Link counts, parents and reachability. `nameless`: the inodes that something holds open."""
    parents: dict[int, list[int]] = {ROOT_INO: []}
    subdirectories: dict[int, int] = {}
    for path, inode in walk(namespace):
        if not inode.is_dir:
            continue
        assert namespace.path_of(inode.ino) == path.rstrip(b"/")
        children = [ino for _, ino in namespace.children(inode.ino)]
        subdirectories[inode.ino] = sum(namespace.inodes[ino].is_dir for ino in children)
        for ino in children:
            parents.setdefault(ino, []).append(inode.ino)
    for ino, found in parents.items():
        inode = namespace.inodes[ino]
        assert inode.ino == ino
        assert not inode.is_dir or len(found) <= 1, f"directory {ino} has {len(found)} names"
        expected = 2 + subdirectories[ino] if inode.is_dir else len(found)
        assert inode.nlink == expected, f"inode {ino} has nlink {inode.nlink}, not {expected}"
        assert inode.parent in found or (ino == ROOT_INO and not inode.parent)
        assert inode.more == max(0, len(found) - 1)
        assert sorted(parent for parent, _ in namespace.names_of(ino)) == sorted(found)
        assert sorted(namespace.parents_of(ino)) == sorted(set(found))
    recorded = sum(namespace.inodes[ino].revision > 0 for ino in subdirectories)
    assert namespace.inodes.totals.directories == recorded
    for ino, usage in namespace.quotas.usages.items():
        assert (usage.inodes, usage.bytes) == recount(namespace, ino)
    left_over = set(namespace.inodes) - set(parents)
    assert left_over == nameless
    assert all(namespace.inodes[ino].nlink == 0 for ino in left_over)
