"""Records that a member may put into etcd, and that nobody of good will would: for tests that put them."""

from collections.abc import Mapping
from typing import Any

import msgspec
from hypothesis import strategies as st

from irdmafs.backend.model import records as forms
from irdmafs.backend.model.lock_claims import Claim, Entry
from irdmafs.backend.model.placement import Targets
from irdmafs.backend.namespace import Inode
from irdmafs.backend.namespace.inode import DAMAGED_INO, FIRST_VIRTUAL_INO

# The kinds of keys that a mount may write, and those that only nodes and admins may.
OF_MOUNTS = b"ditusPwlDWmpfaLx"
OF_OTHERS = b"cNngTKER"

_NUMBER = st.sampled_from(
    [0, 1, 2, 5, 255, 256, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)]
)
_INO = st.sampled_from(
    [0, 1, 2, 9, FIRST_VIRTUAL_INO - 1, FIRST_VIRTUAL_INO, DAMAGED_INO, 2**64 - 1]
)
_NO_TEXT = "ÿ"  # Two bytes long; in a record the two are others, which are not UTF-8.
_TEXT = st.sampled_from(
    ["", "x", _NO_TEXT, "a\nb", "\x1b[31m", "zone=a|b spread=orbit", "é" * 5000]
)
# Also lists in lists, deeper than a decoder goes.
_BYTES = st.one_of(
    st.binary(max_size=20), st.just(b"b" * 5000), st.just(bytes(8)), st.just(b"\x91" * 5000)
)
_ATOM = st.one_of(_NUMBER, _TEXT, _BYTES, st.none(), st.booleans(), st.sampled_from([-0.5, 1e308]))
_ANYTHING = st.recursive(
    _ATOM,
    lambda below: st.one_of(
        st.lists(below, max_size=4), st.dictionaries(st.one_of(_TEXT, _NUMBER), below, max_size=3)
    ),
    max_leaves=12,
)
_NAMES = st.one_of(
    st.sampled_from(
        [b"a", b"b", b".", b"..", b"a/b", b"a\0", b"a\nb", b"n" * 255, b"n" * 256, b""]
    ),
    st.binary(max_size=12),
)


_FILE = Inode(9, 0o100644, 0, 0, 1)
_FILE.version, _FILE.xattrs = 1, {b"user.irdmafs.quota_bytes": b"-5", b"": b"x" * 300}
# A sound record of each kind that has fields.
_SOUND: dict[int, bytes] = {
    ord("i"): _FILE.encode(),
    ord("m"): forms.encode(forms.MountRecord("host", "/mnt", 7, "0.2", "name", "mount", bytes(32))),
    ord("L"): forms.encode(Entry(False, (Claim(0, 1, 5, 9),), (Claim(1, 0, 0, 2**62),), True, 4)),
    ord("c"): forms.encode(forms.Settings(1, "id", 2, 8, 1 << 30, 3)),
    ord("N"): forms.encode(forms.NodeRecord("up", 1.0, {"zone": "a"})),
    ord("n"): forms.encode(forms.NodeAddress("::1", 5, 6, ["tcp"], "h", "/s", 9, 8, "0.2")),
    ord("g"): forms.encode(forms.GroupConfig(3, (1, 2), (3,))),
    ord("T"): forms.encode(Targets("for", (1, 2), 2, bytes([0, 0, 1, 0]))),
    ord("K"): forms.encode(forms.CertificateRecord("name", "mount", 7, 1, 2)),
    ord("E"): forms.encode(forms.Epoch(0, "", 0)),
    ord("R"): forms.encode(forms.Report(0, 1, 0, 1.0)),
}


def is_inode(key: bytes, value: bytes) -> bool:
    """Return whether a record is a sound one of an inode, which says for good what that is from now on."""
    try:
        return key.startswith(b"i") and bool(Inode.decode(0, value, 0))
    except msgspec.DecodeError:
        return False


def _packed(record: Any) -> bytes:
    packed: bytes = msgspec.msgpack.encode(record)
    return packed.replace(_NO_TEXT.encode(), b"\xff\xff")


@st.composite
def _mutated(draw: st.DrawFn, sound: bytes) -> bytes:
    """A record of which some fields are others, or that has more or fewer of them."""
    fields: list[Any] = msgspec.msgpack.decode(sound)
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(fields)))
        change = draw(st.integers(0, 9))
        if change == 0:
            del fields[place:]
        elif change == 1:
            fields.insert(place, draw(_ANYTHING))
        elif place < len(fields):
            fields[place] = draw(_NUMBER if isinstance(fields[place], int) else _ANYTHING)
    try:
        return _packed(fields)
    except (OverflowError, TypeError):
        return sound  # what msgpack cannot say


@st.composite
def _anything(draw: st.DrawFn) -> bytes:
    try:
        return _packed(draw(_ANYTHING))
    except (OverflowError, TypeError):
        return b"\xc1"


@st.composite
def records(
    draw: st.DrawFn, kinds: bytes, known: Mapping[bytes, bytes] | None = None
) -> tuple[bytes, bytes]:
    """A key of one of these kinds, and a value. `known` are records that are there: some are put anew,
    with changes, and others refer to them."""
    known = known or {}
    numbers = st.one_of(
        _INO, st.sampled_from([int.from_bytes(k[1:9], "big") for k in known] or [3])
    )
    kind = draw(st.sampled_from(kinds))
    of_kind = [key for key in known if key[0] == kind]
    key = draw(st.sampled_from([b"", *of_kind]))
    if key:
        sound = known[key]
    else:
        key = bytes([kind]) + draw(numbers).to_bytes(8, "big")
        if kind in b"pfLW":
            key += draw(numbers).to_bytes(8, "big")
        elif kind == ord("d"):
            key += draw(_NAMES)
        elif kind == ord("g"):
            key = key[:1] + key[5:9]
        elif kind in b"cusE":
            key = key[:1]
        if draw(st.integers(0, 7)) == 0:
            key = key[: draw(st.integers(1, len(key)))] + draw(st.binary(max_size=3))
        sound = _SOUND.get(kind, b"")
    how = draw(st.integers(0, 9))
    if how == 0:
        return key, draw(_BYTES)
    if how == 1:
        return key, draw(_anything())
    if kind in b"dtul" or kind == ord("a"):
        return key, draw(numbers).to_bytes(8, "big")
    if kind == ord("P"):
        return key, draw(_TEXT).encode()
    return key, draw(_mutated(sound)) if kind in _SOUND else b""
