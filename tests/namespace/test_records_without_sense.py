"""Whatever records there are, a tree stays a tree: what makes no sense is passed over."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from harness.fuzzed_records import is_inode
from hypothesis import given, note
from hypothesis import strategies as st

from irdmafs.backend.kv import Event, KeyValue
from irdmafs.backend.model.records import ContentId, Layout
from irdmafs.backend.namespace import ROOT_INO, Inode
from irdmafs.backend.namespace.drafts import DRAFTS, is_draft
from irdmafs.backend.namespace.inode import FIRST_VIRTUAL_INO, inode_key, name_key
from irdmafs.backend.namespace.lookup import Inodes
from irdmafs.backend.namespace.numbers import SUBVOLUMES, next_ino_key, numbers_of
from irdmafs.backend.namespace.quotas import QUOTA_NAMES
from irdmafs.backend.namespace.tree import Tree

ANY_NUMBER = st.integers(-(2**63), 2**64 - 1)
TOPS = (SUBVOLUMES[0], SUBVOLUMES[-1])
INOS = st.one_of(
    st.integers(1, 7), st.sampled_from([0, *TOPS, TOPS[0] + 1, FIRST_VIRTUAL_INO, 2**64 - 1])
)
NAMES = st.sampled_from([b"a", b"b", b"c", b"", b".", b"..", b"/", b"a\0", b"n" * 256])
MODES = st.sampled_from([0o40755, 0o40755, 0o40755, 0o100644, 0o120777, 0o7777777, 0, -1])
LIMITS = st.dictionaries(
    st.sampled_from([*QUOTA_NAMES, b""]),
    st.sampled_from([b"3", b"-5", b"x", b"", b"9" * 400, b"9" * 5000]),
    max_size=2,
)


def test_patterns_of_drafts_that_no_mount_sets_are_not_all_compared() -> None:
    root = Inode(ROOT_INO, 0o40755, 0, 0, 5)
    root.xattrs = {DRAFTS: b"a " * 200 + b"*"}
    assert not is_draft({ROOT_INO: root}, ROOT_INO, b"b")
    assert is_draft({ROOT_INO: root}, ROOT_INO, b"a")
    assert is_draft({ROOT_INO: root}, ROOT_INO, b".draft-b", b"b")


@st.composite
def inode_values(draw: st.DrawFn) -> bytes:
    inode = Inode(7, draw(MODES), 0, 0, 5)
    inode.xattrs = draw(LIMITS)
    for field in draw(st.sets(st.sampled_from(["size", "nlink", "uid", "version", "mtime_ns"]))):
        setattr(inode, field, draw(ANY_NUMBER))
    if draw(st.booleans()):
        inode.extent = ContentId(draw(st.integers(0, 2**62)))
        inode.layout = Layout(draw(ANY_NUMBER), draw(ANY_NUMBER))
    value = inode.encode()
    return value[: draw(st.integers(0, len(value)))] if draw(st.integers(0, 9)) == 0 else value


def directory(ino: int) -> tuple[bytes, bytes]:
    return inode_key(ino), Inode(ino, 0o40755, 0, 0, 5).encode()


@st.composite
def records(draw: st.DrawFn) -> tuple[bytes, bytes | None]:
    kind = draw(st.sampled_from([b"d", b"d", b"d", b"d", b"i", b"i", b"t", b"u"]))
    if kind == b"u":
        subvolume = draw(st.sampled_from([ROOT_INO, *TOPS]))
        return next_ino_key(subvolume), draw(st.binary(max_size=9))
    key = kind + draw(INOS).to_bytes(8, "big")
    if kind == b"d":
        key += draw(NAMES)
    elif draw(st.integers(0, 9)) == 0:
        key = key[: draw(st.integers(1, 9))] + draw(st.binary(max_size=1))
    if draw(st.integers(0, 4)) == 0:
        return key, None
    if kind == b"d":
        return key, draw(INOS).to_bytes(8, "big") if draw(st.integers(0, 9)) else b"short"
    return key, draw(inode_values()) if kind == b"i" else draw(st.binary(max_size=9))


CHANGES = st.lists(st.lists(records(), min_size=1, max_size=12), max_size=8)


def check(tree: Tree) -> None:
    """Check that every name leads to an inode, and that every directory has one place below the root."""
    found = {ROOT_INO}
    for name in (b"a", b"b", b"c"):
        for ino in tree.inodes:
            if tree.inodes[ino].is_dir and tree.inodes[ino].nlink:
                tree.lookup(ino, name)
    waiting = [(ROOT_INO, b"")]
    while waiting:
        here, path = waiting.pop()
        assert tree.path_of(here) == path
        below = [(name, ino) for name, ino in tree.children(here) if tree.inodes[ino].is_dir]
        assert tree.inodes[here].nlink == 2 + len(below)
        for name, ino in below:
            assert ino not in found
            assert tree.parent_of(ino) == here
            found.add(ino)
            waiting.append((ino, path + b"/" + name))
    for ino in tree.inodes:
        above, passed = tree.inodes.get(tree.inodes[ino].parent), 0
        while above is not None:
            above, passed = tree.inodes.get(above.parent), passed + 1
            assert passed <= len(tree.inodes)
        tree.describe(ino)
        tree.quotas.of(ino)
        tree.names_of(ino)
    for subvolume in (ROOT_INO, *TOPS):
        assert subvolume < tree.next_block(subvolume)[0] in numbers_of(subvolume)


def loaded(present: Iterable[tuple[bytes, bytes]]) -> Tree:
    tree = Tree()
    tree.load([KeyValue(key, value, 1) for key, value in present], 1)
    return tree


@pytest.mark.long
@given(CHANGES)
def test_a_tree_stays_a_tree(changes: list[list[tuple[bytes, bytes | None]]]) -> None:
    present = dict(map(directory, (ROOT_INO, 2, 3, 4)))
    tree = loaded(present.items())
    for revision, change in enumerate(changes, 2):
        note(str(change))
        tree.apply(revision, [Event(revision, key, value) for key, value in change])
        check(tree)
        for key, value in change:
            present.pop(key, None)
            if value is not None:
                present[key] = value
    if inode_key(ROOT_INO) in present:
        tree.load([KeyValue(key, value, 9) for key, value in present.items()], 99)
        check(tree)


def test_an_inode_of_no_links_stays_while_names_lead_to_it() -> None:
    inode = Inode(5, 0o100644, 0, 0, 5)
    inode.nlink = 0
    name = name_key(ROOT_INO, b"a"), (5).to_bytes(8, "big")
    tree = loaded([directory(ROOT_INO), (inode_key(5), inode.encode()), name])
    tree.drop(5)
    assert tree.lookup(ROOT_INO, b"a") is not None
    tree.apply(2, [Event(2, name[0], None)])
    assert tree.lookup(ROOT_INO, b"a") is None


def test_a_name_without_a_directory_counts_when_all_is_read_anew() -> None:
    file = inode_key(5), Inode(5, 0o100644, 0, 0, 5).encode()
    early = name_key(4, b"b"), bytes(7) + b"\5"
    late = directory(4), (name_key(ROOT_INO, b"d"), bytes(7) + b"\4")
    tree = loaded([directory(ROOT_INO), file])
    tree.apply(2, [Event(2, *early)])
    tree.apply(3, [Event(3, *record) for record in late])
    assert tree.names_of(5) == []
    tree.load([KeyValue(*record, 9) for record in (directory(ROOT_INO), file, early, *late)], 9)
    assert tree.names_of(5) == [(4, b"b")]


def test_a_directory_that_loses_its_first_name_is_where_the_second_one_says() -> None:
    first, second = (name_key(ROOT_INO, name) for name in (b"a", b"b"))
    tree = loaded([*map(directory, (ROOT_INO, 2)), (first, bytes(7) + b"\2")])
    tree.apply(2, [Event(2, second, bytes(7) + b"\2")])
    assert tree.path_of(2) == b"/a"
    tree.apply(3, [Event(3, first, None)])
    assert tree.path_of(2) == b"/b"


def test_a_second_name_of_a_directory_that_went_while_changes_were_missed_is_forgotten() -> None:
    first, second = (name_key(ROOT_INO, name) for name in (b"a", b"b"))
    records = [*map(directory, (ROOT_INO, 2)), (first, bytes(7) + b"\2")]
    tree = loaded(records)
    tree.apply(2, [Event(2, second, bytes(7) + b"\2")])
    tree.load([KeyValue(*record, 1) for record in records], 3)
    tree.apply(4, [Event(4, first, None)])
    assert not tree.children(ROOT_INO)


def test_names_that_wait_for_ever_cost_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are in a directory that lies deep below the one they lead to, which has no name."""
    depth, looks, original = 300, Counter[int](), Inodes.get
    chain = [(name_key(ino, b"c"), (ino + 1).to_bytes(8, "big")) for ino in range(2, depth)]
    tree = loaded([*map(directory, (ROOT_INO, *range(2, depth + 1))), *chain])
    for number in range(100):
        tree.apply(2, [Event(2, name_key(depth, b"%d" % number), bytes(7) + b"\2")])

    def get(inodes: Inodes, ino: int) -> Inode | None:
        looks[ino] += 1
        return original(inodes, ino)

    monkeypatch.setattr(Inodes, "get", get)
    tree.apply(3, [Event(3, name_key(ROOT_INO, b"a"), (999).to_bytes(8, "big"))])
    assert looks.total() < 10
    tree.apply(4, [Event(4, *directory(998))])
    assert depth < looks.total() < 2 * depth + 200


@pytest.mark.parametrize("order", [1, -1])
def test_removed_directories_do_not_lie_in_each_other(order: int) -> None:
    """A program may work in one, and what rules there is looked for above it."""
    two, three, last = bytes(7) + b"\2", bytes(7) + b"\3", name_key(3, b"c")
    names = [(name_key(2, b"b"), three), (name_key(ROOT_INO, b"a"), two)]
    tree = loaded([*map(directory, (ROOT_INO, 2, 3)), *names])
    for revision, (name, _) in enumerate(names[::order], 2):
        tree.apply(revision, [Event(revision, name, None)])
    tree.apply(4, [Event(4, last, two)])
    check(tree)


@given(st.lists(records(), max_size=20))
def test_what_is_there_at_the_start_is_a_tree(found: list[tuple[bytes, bytes | None]]) -> None:
    present = dict(map(directory, (2, 3, 4)))
    present |= {key: value for key, value in found if value is not None}
    check(loaded((present | dict([directory(ROOT_INO)])).items()))


def shown(tree: Tree) -> dict[bytes, tuple[bytes, int, list[int]]]:
    """All that is below the root, by path: the record, the link count and the directories of each inode."""
    found: dict[bytes, tuple[bytes, int, list[int]]] = {}
    waiting = [(ROOT_INO, b"")]
    while waiting:
        here, path = waiting.pop()
        inode = tree.inode(here)
        found[path] = inode.encode(), inode.nlink, sorted(tree.parents_of(here))
        if inode.is_dir:
            waiting += [(ino, path + b"/" + name) for name, ino in tree.children(here)]
    return found


@pytest.mark.long
@given(CHANGES, st.integers(0, 8), st.randoms())
def test_what_is_mended_is_as_it_was(
    changes: list[list[tuple[bytes, bytes | None]]], late_after: int, order: random.Random
) -> None:
    """Each record is mended by itself, in any order."""
    file, link = Inode(5, 0o100644, 0, 0, 5), Inode(6, 0o120777, 0, 0, 5)
    file.nlink = 2
    present = dict(map(directory, (ROOT_INO, 2, 3, 4)))
    present |= {inode_key(inode.ino): inode.encode() for inode in (file, link)}
    places = [(1, b"a", 2), (2, b"a", 3), (2, b"b", 4), (3, b"c", 5), (4, b"b", 5), (1, b"c", 6)]
    present |= {name_key(parent, name): ino.to_bytes(8, "big") for parent, name, ino in places}
    here = loaded(present.items())
    before = shown(here)
    records_now = dict(present)
    late = None
    for revision, change in enumerate(changes, 2):
        puts = [
            (key, value)
            for key, value in change
            if value is not None and not (key in present and is_inode(key, value))
        ]
        records_now.update(puts)
        for tree in filter(None, (here, late)):
            tree.apply(revision, [Event(revision, key, value) for key, value in puts])
        if revision - 2 == late_after:
            late = loaded(records_now.items())
    mended: list[tuple[bytes, bytes | None]] = [*present.items()]
    mended += [(key, None) for key in sorted(records_now.keys() - present.keys())]
    order.shuffle(mended)
    for tree in filter(None, (here, late)):
        for revision, (key, value) in enumerate(mended, 99):
            tree.apply(revision, [Event(revision, key, value)])
        assert shown(tree) == before
        assert not tree.damaged
