"""What holds of every namespace whenever no operation is under way."""

from collections.abc import Iterator

from irdmafs.backend.namespace import ROOT_INO, Inode, Namespace


def walk(
    namespace: Namespace, ino: int = ROOT_INO, path: bytes = b""
) -> Iterator[tuple[bytes, Inode]]:
    """Every path and its inode, from the root."""
    yield path or b"/", namespace.inodes[ino]
    for name, child in namespace.children(ino):
        if namespace.inodes[child].is_dir:
            yield from walk(namespace, child, path + b"/" + name)
        else:
            yield path + b"/" + name, namespace.inodes[child]


def check(namespace: Namespace, nameless: frozenset[int] = frozenset()) -> None:
    """Link counts, parents and reachability. `nameless`: the inodes that something holds open."""
    names: dict[int, int] = {}
    subdirectories: dict[int, int] = {}
    for path, inode in walk(namespace):
        names[inode.ino] = names.get(inode.ino, 0) + 1
        if inode.is_dir:
            children = [namespace.inodes[ino] for _, ino in namespace.children(inode.ino)]
            subdirectories[inode.ino] = sum(child.is_dir for child in children)
            assert all(child.parent == inode.ino for child in children if child.is_dir), path
    for ino, count in names.items():
        inode = namespace.inodes[ino]
        assert inode.ino == ino
        assert not inode.is_dir or count == 1, f"directory {ino} has {count} names"
        expected = 2 + subdirectories[ino] if inode.is_dir else count
        assert inode.nlink == expected, f"inode {ino} has nlink {inode.nlink}, not {expected}"
    left_over = set(namespace.inodes) - set(names)
    assert left_over == nameless
    assert all(namespace.inodes[ino].nlink == 0 for ino in left_over)
