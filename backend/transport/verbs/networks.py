"""The networks of this host's addresses, asked of the kernel over netlink."""

import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

_RTM_GETADDR, _RTM_NEWADDR, _NLMSG_DONE, _NLMSG_ERROR = 22, 20, 3, 2
_NLM_F_DUMP_REQUEST = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_MESSAGE = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_ANSWER_BYTES = 64 << 10

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Own(NamedTuple):
    """The length of the prefix of an own address's network, and the number of its interface."""

    bits: int
    interface: int


Addresses = dict[Address, Own]


def own_addresses() -> Addresses:
    """Return the addresses of this host. Raises OSError."""
    question = _MESSAGE.pack(
        _MESSAGE.size + _ADDRESS.size, _RTM_GETADDR, _NLM_F_DUMP_REQUEST, 1, 0
    ) + _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    found: Addresses = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.send(question)
        while answer := sock.recv(_ANSWER_BYTES):
            for kind, content in _records(answer, _MESSAGE):
                if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                    return found
                if kind == _RTM_NEWADDR:
                    _, bits, _, _, interface = _ADDRESS.unpack_from(content)
                    values = dict(_records(content[_ADDRESS.size :], _ATTRIBUTE))
                    # On a point-to-point link IFA_ADDRESS is the peer's address.
                    value = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)
                    if value is not None:
                        found[ipaddress.ip_address(value)] = Own(bits, interface)
    return found


def _records(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the content of each record, whose header begins with its length and its kind."""
    at = 0
    while at + header.size <= len(data):
        length, kind, *_ = header.unpack_from(data, at)
        if length < header.size:
            break
        yield kind, data[at + header.size : at + length]
        at += length + -length % 4
