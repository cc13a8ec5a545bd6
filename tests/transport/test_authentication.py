"""The peers that are believed on a data connection, and what each kind may ask of a store node."""

import inspect
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irdmafs.backend.transport import messages
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.operations import codec_for
from irdmafs.backend.transport.rights import ROLES, Scope, may, session_digest
from irdmafs.backend.transport.tcp.authentication import CODE_BYTES, Authentication, Forged
from irdmafs.backend.transport.tcp.wire import RIGHTS, Op
from irdmafs.backend.transport.verbs.messages import Reserve


def ends() -> tuple[Authentication, Authentication]:
    key = os.urandom(32)
    return Authentication(key, listens=False), Authentication(key, listens=True)


# -- messages ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=300)), max_size=20))
def test_what_the_other_end_sends_is_believed(sent: list[tuple[bool, bytes]]) -> None:
    pair = ends()
    for to_node, message in sent:
        sender, receiver = pair if to_node else pair[::-1]
        receiver.check(message, sender.sign(message))


@given(st.data(), st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=6))
def test_changed_missing_repeated_or_swapped_is_not(data: st.DataObject, sent: list[bytes]) -> None:
    caller, node = ends()
    signed = [(message, caller.sign(message)) for message in sent]
    kind = data.draw(st.sampled_from(["changed", "left out", "repeated", "swapped", "another's"]))
    place = data.draw(st.integers(0, len(sent) - 1))
    for message, code in signed[:place]:
        node.check(message, code)
    message, code = signed[place]
    if kind == "changed":
        bit = data.draw(st.integers(0, 8 * len(message + code) - 1))
        both = bytearray(message + code)
        both[bit // 8] ^= 1 << bit % 8
        message, code = bytes(both[:-CODE_BYTES]), bytes(both[-CODE_BYTES:])
    elif kind == "repeated":
        node.check(message, code)
    elif kind == "another's":
        # Sent back, or of another connection.
        node = caller if data.draw(st.booleans()) else ends()[1]
    elif place + 1 < len(signed):  # left out, and swapped in consequence
        message, code = signed[place + 1]
    else:
        return
    with pytest.raises(Forged):
        node.check(message, code)


def test_the_record_of_a_session_does_not_tell_its_key() -> None:
    key = os.urandom(32)
    assert key not in session_digest(key)
    assert session_digest(key) == session_digest(key) != session_digest(os.urandom(32))


# -- rights --------------------------------------------------------------------------------------

MOVERS = all_movers()
TABLE = codec_for(MOVERS).rights
HANDSHAKE = {messages.Hello, messages.Welcome, messages.Refused}
BASES = {
    messages.Message,
    messages.Request,
    messages.Prompt,
    messages.AboutContents,
    messages.AboutExtent,
    messages.ToTarget,
    messages.Answer,
}


def test_every_message_that_a_peer_may_send_is_in_the_table() -> None:
    kinds = {
        kind
        for module in {messages, *(inspect.getmodule(message) for message in TABLE)}
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, messages.Message) and not issubclass(kind, messages.Answer)
    }
    assert kinds - HANDSHAKE - BASES == set(TABLE)
    assert set(RIGHTS) == set(Op)


def test_only_mounts_and_nodes_write_and_mounts_only_their_own() -> None:
    for kind in (messages.Put, Reserve, messages.Adopt, messages.Abort):
        assert may(TABLE, "mount", kind) is Scope.OWN
        assert may(TABLE, "reader", kind) is may(TABLE, "admin", kind) is Scope.NONE
    assert may(RIGHTS, "mount", Op.WRITE) is Scope.OWN
    assert may(RIGHTS, "reader", Op.WRITE) is may(RIGHTS, "admin", Op.WRITE) is Scope.NONE
    for role in ROLES:
        assert may(TABLE, role, messages.Ping) is Scope.ANY


@pytest.mark.parametrize("role", ["", "king", "etcd", "NODE"])
def test_a_role_that_is_not_known_has_no_rights(role: str) -> None:
    assert {may(TABLE, role, kind) for kind in TABLE} == {Scope.NONE}
    assert {may(RIGHTS, role, op) for op in RIGHTS} == {Scope.NONE}


def test_a_message_that_is_not_in_the_table_is_nobodys_right() -> None:
    assert may(TABLE, "node", messages.Hello) is Scope.NONE
