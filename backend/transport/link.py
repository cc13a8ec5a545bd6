"""The connection of this process to one store node."""

import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import trio

from ..model.records import NodeAddress
from ..trust.security import is_final, peer_identity
from ..unwrap import if_it_fails
from . import Distrusted, Unreachable
from .caller import A, Caller, ControlClient, Ends, broken_text
from .frames import FRAME_BYTES_MAX, BadMessage, Frames, decode_welcome
from .messages import VERSION, Hello, Refused, Request
from .prompt import PromptStream

log = logging.getLogger(__name__)

# How long a node is left alone, at least, after it could not be reached.
_SETBACK_S = 0.1
OPERATIONS_AT_ONCE = 8
# The kernel's time-out is so many times that of this process.
USER_TIMEOUTS = 3


class Refusal(Exception):
    """The node and this process do not accept each other, which will not change by itself."""


class Link:
    """A store node's control connection, opened when it is needed, and again after it was lost. `node` 0
    stands for whichever node is at the address."""

    def __init__(self, caller: Caller, node: int) -> None:
        self.caller = caller
        self.node = node
        # The limit of extents that are sent to the node or received from it at a time.
        self.operations = trio.Semaphore(OPERATIONS_AT_ONCE)
        # Functions that are called when the node is given up, which is gone.
        self.given_up: list[Callable[[], None]] = []
        self._connecting = trio.Lock()
        self._control: ControlClient | None = None
        # Where the node was registered when it was looked at last.
        self._where: tuple[str, int, int] | None = None
        self._attempt = trio.CancelScope()  # to connect
        self._alone_until = 0.0
        self._why = ""
        self._distrusts = False

    @property
    def refusal(self) -> str:
        """Return why the node and this process do not accept each other; "" if they do, or if unknown."""
        return self._why if self._distrusts else ""

    async def ask(self, request: Request, kind: type[A]) -> A:
        """Send a request and return its answer of this kind. Raises OSError."""
        return await (await self.connected()).ask(request, kind)

    def give_up(self, why: str) -> None:
        """End all calls now, and attempts to connect: the node is known to be gone. Once it is registered
        again it is not left alone for what was before."""
        for end in self.given_up:
            end()
        if self._control is not None:
            self._control.close(why)
            self._control = None
        self._attempt.cancel()
        self._where = None

    # -- the control connection ------------------------------------------------------------------

    async def connected(self) -> ControlClient:
        """Return the control connection as it is now. Raises Unreachable."""
        control = self._control
        if self._registered()[1] == self._where:
            if control is not None and control.is_open:
                return control
            if self._why and self._leaves_trying():
                raise self._unreachable()
        return await self._connected_anew()

    def _leaves_trying(self) -> bool:
        """Leave it to a task to reach the node, which begins when it is time, as nobody waits again for one
        that could not be reached. Return False if the last attempt is too long ago to tell."""
        if self._connecting.locked():
            return True
        late_s = time.monotonic() - self._alone_until
        if 0.0 <= late_s < self.caller.timeout_s:
            self.caller.nursery.start_soon(self._try_again)
        return late_s < self.caller.timeout_s

    async def _try_again(self) -> None:
        with suppress(Unreachable):
            await self._connected_anew()

    async def _connected_anew(self) -> ControlClient:
        async with self._connecting:
            # As it is now, and not before others tried.
            address, where = self._registered()
            if self._control is not None and (not self._control.is_open or where != self._where):
                self._control.close("its address changed")
                self._control = None
            if where != self._where:
                self._where, self._why = where, ""
                self._alone_until = 0.0
            if self._control is None:
                if time.monotonic() < self._alone_until:
                    raise self._unreachable()
                self._control = await self._connect(address)
            return self._control

    def _registered(self) -> tuple[NodeAddress, tuple[str, int, int]]:
        """Return the node's address, and the part of it that connections depend on. Raises Unreachable."""
        address = self.caller.resolve(self.node)
        if address is None:
            raise Unreachable(self.node, "it is not registered")
        return address, (address.address, address.control_port, address.data_port)

    async def _connect(self, address: NodeAddress) -> ControlClient:
        timeout_s = self.caller.timeout_s
        self.caller.counters.connects += 1
        began = time.monotonic()
        why, final = "", False
        try:
            with trio.move_on_after(timeout_s) as self._attempt:
                frames, ends = await self._open(address)
            if self._attempt.cancelled_caught:
                why = f"no answer for {time.monotonic() - began:.1f} s"
        except trio.BrokenResourceError as error:
            why = broken_text(error)
            if isinstance(error.__cause__, ssl.SSLError):
                final = is_final(error.__cause__)
                if self.caller.credentials is not None:
                    why += f"; we trust {self.caller.credentials.ca}"
        except Refusal as error:
            why, final = str(error), True
        except (BadMessage, trio.EndOfChannel) as error:
            why = str(error) or "it closed the connection"
        except OSError as error:
            why = error.strerror or str(error)
        except ValueError as error:
            why = f"nothing has such an address: {error}"
        if not why:
            self._why, self._distrusts = "", False
            # A node that does not answer in time is left alone: the next caller need not wait for it.
            silent = partial(self._leave_alone, timeout_s / 2)
            control = ControlClient(self.caller, self.node, frames, ends, silent)
            control.start()
            return control
        took_s = min(time.monotonic() - began, timeout_s)
        if final and (why, final) != (self._why, self._distrusts):
            log.warning("store node %x at %s: %s", self.node, address.address, why)
        self._leave_alone(max(took_s, _SETBACK_S), why, final=final)
        raise self._unreachable()

    def _unreachable(self) -> Unreachable:
        return (Distrusted if self._distrusts else Unreachable)(self.node, self._why)

    def _leave_alone(self, time_s: float, why: str, *, final: bool = False) -> None:
        self._alone_until = time.monotonic() + time_s
        self._why = why
        self._distrusts = final

    async def _open(self, address: NodeAddress) -> tuple[Frames, Ends]:
        caller = self.caller
        connected = await trio.open_tcp_stream(address.address, address.control_port)
        plain = PromptStream(socket.socket(fileno=connected.socket.detach()))
        with if_it_fails(plain.close):
            sock = plain.socket
            timeout_ms = int(caller.timeout_s * USER_TIMEOUTS * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
            ends = Ends(sock.family, sock.getsockname()[0], sock.getpeername(), address)
            stream: trio.abc.Stream = plain
            if caller.credentials is not None:
                stream = secure = trio.SSLStream(plain, caller.credentials.client_context())
                await secure.do_handshake()
                check_node(secure, caller.is_revoked)
            return await self._introduce(stream), ends

    async def _introduce(self, stream: trio.abc.Stream) -> Frames:
        caller = self.caller
        frames = Frames(stream, FRAME_BYTES_MAX)
        session, key = caller.session(), caller.session_key
        await frames.send(Hello(VERSION, caller.role, caller.name, session, self.node, key))
        caller.counters.round_trips += 1
        answer = decode_welcome(await frames.receive())
        if isinstance(answer, Refused):
            kind = Refusal if answer.for_good else BadMessage
            raise kind(f"it refuses: {answer.text[:200]}")
        if self.node and answer.node != self.node:
            raise BadMessage(f"store node {answer.node:x} is at its address")
        return frames


def check_node(
    connection: trio.SSLStream[PromptStream] | ssl.SSLSocket, is_revoked: Callable[[str], bool]
) -> None:
    """Raise Refusal if the peer is not a store node."""
    identity = peer_identity(connection)
    if identity is None or identity.role != "node":
        raise Refusal("its certificate is not a store node's")
    if is_revoked(identity.serial):
        raise Refusal("its certificate was revoked")
