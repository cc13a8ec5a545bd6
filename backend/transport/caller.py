"""The caller's end of one control connection, and the calling process."""

import itertools
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar

import trio

from ..model.records import NodeAddress
from ..observe.logs import current_request
from ..trust.security import Credentials, describe_tls_error
from . import Unreachable, messages
from .frames import BadMessage, Codec, Frames
from .prompt import acquire

log = logging.getLogger(__name__)

A = TypeVar("A", bound=messages.Answer)

KEEP_ALIVE_S = 15.0
# In the time that a node may be silent.
_LOOKS = 8
# A message that is sent with the next request waits no longer for one.
_PUT_OFF_S = 0.01


@dataclass(slots=True)
class Counters:
    """The caller's end. `round_trips` are those that a caller waited for, one after the other: the streams
    of one transfer count once. `moved_bytes` are by the mover that did it, `fallbacks` the transfers that
    began with one mover and were done by another, `reroutes` those that went on over another queue pair;
    `rails` is what moved over each of this end's rails. `message_bytes` are those of extents inside
    messages, which alone are in Python objects. `connects` are attempts to reach a node."""

    moved_bytes: Counter[str] = field(default_factory=Counter)
    message_bytes: int = 0
    fallbacks: int = 0
    reroutes: int = 0
    rails: Counter[str] = field(default_factory=Counter)
    round_trips: int = 0
    connects: int = 0


@dataclass(frozen=True)
class Caller:
    """The process that calls store nodes. `resolve` returns the address of a node (None: it is not
    registered), `session` the number of this process's session, which `session_key` shows to be its own.
    `credentials` are for TLS, None where there are no certificates; `is_revoked` tells whether a node's
    certificate, by its serial number, is not accepted any more. A node that is silent for `timeout_s` is
    given up. `nursery` outlives all connections."""

    name: str
    role: str
    resolve: Callable[[int], NodeAddress | None]
    codec: Codec
    nursery: trio.Nursery
    credentials: Credentials | None = None
    is_revoked: Callable[[str], bool] = lambda serial: False
    session: Callable[[], int] = lambda: 0
    session_key: bytes = b""
    timeout_s: float = 5.0
    counters: Counters = field(default_factory=Counters)


class Ends(NamedTuple):
    """The addresses of a control connection. `there` is the peer's; `record` the node's registration."""

    family: socket.AddressFamily
    here: str
    there: tuple[Any, ...]
    record: NodeAddress


class Expected:
    """An answer that is awaited inside of a `with` block."""

    def __init__(self, control: "ControlClient", limit_s: float = messages.Request.limit_s) -> None:
        self._control = control
        self.limit_s = limit_s
        self._event = trio.Event()
        # The answer, or why there is none.
        self._outcome: messages.Answer | str = ""
        self.number = control.expect(self)
        # When it was first seen to be late, if it was.
        self.late_since: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.waiting.pop(self.number, None)

    def end(self, outcome: messages.Answer | str) -> None:
        self._outcome = outcome
        self._event.set()

    async def answer(self, kind: type[A]) -> A:
        """Return the answer, which is of this kind. Raises OSError: Unreachable, or the node's error."""
        if self._control.is_open and not self._event.is_set():
            await self._event.wait()
        outcome = self._outcome
        if isinstance(outcome, kind):
            return outcome
        if isinstance(outcome, messages.Failed):
            raise messages.error_of(outcome.code, outcome.node, outcome.text)
        why = outcome if isinstance(outcome, str) else "its answer makes no sense"
        raise Unreachable(self._control.node, why or self._control.why)


class ControlClient:
    """The caller's end of one control connection, with any number of calls at once. `silent(why)` is
    called when the node is given up because it does not answer."""

    def __init__(
        self, caller: Caller, node: int, frames: Frames, ends: Ends, silent: Callable[[str], None]
    ) -> None:
        self.caller = caller
        self.node = node
        self.ends = ends
        self._frames = frames
        self._silent = silent
        self._session = caller.session()
        self._numbers = itertools.count(1)
        self.waiting: dict[int, Expected] = {}
        self._slots = trio.Semaphore(messages.REQUESTS_AT_ONCE - 2)
        self._scope = trio.CancelScope()
        self.why = ""
        self._put_off = trio.Event()
        # Counts of received frames, and of calls that began to wait for one: `_watch` checks them
        # periodically, as reading the clock for each would cost more.
        self.heard = self._began = 0
        self._wake = trio.Event()
        self.watchers = 0
        # Functions that are called with the reason when the connection ends.
        self.closers: list[Callable[[str], None]] = []
        self.is_open = True

    def start(self) -> None:
        self.caller.nursery.start_soon(self._run)

    def close(self, why: str) -> None:
        if self.is_open:
            self.is_open = False
            self.why = why
            for expected in self.waiting.values():
                expected.end(why)
            for close in self.closers:
                close(why)
            self._scope.cancel()

    def begin_waiting(self) -> None:
        """Note that somebody is about to wait for the node: for an answer or, one of the `watchers`, while
        data is moved. Meanwhile the node is checked to be alive, so that a stall is noticed."""
        if not (self.waiting or self.watchers):
            self._began += 1
            self._wake.set()

    async def ask(self, request: messages.Request, kind: type[A]) -> A:
        """Send a request and return its answer of this kind. Raises as `Expected.answer`."""
        await acquire(self._slots)
        try:
            with Expected(self, request.limit_s) as expected:
                self.caller.counters.round_trips += 1
                await self._send(request, expected)
                return await expected.answer(kind)
        finally:
            self._slots.release()

    async def say(self, message: messages.Message) -> None:
        """Send a message that has no answer. A connection that breaks is closed."""
        if self.is_open:
            self._frames.put(message)
            await self._flush()

    async def _flush(self) -> None:
        try:
            # A frame is sent whole, or the connection is unusable; `_watch` ends calls that take too long.
            if not self._frames.flush_now():
                with trio.CancelScope(shield=True):
                    await self._frames.flush()
        except trio.BrokenResourceError as error:
            self.close(broken_text(error))
        except trio.ClosedResourceError:
            self.close("the connection was closed")

    def say_later(self, message: messages.Message) -> None:
        """Send a message without an answer with the next request, or soon."""
        if self.is_open:
            self._frames.put(message)
            self._put_off.set()

    def expect(self, expected: Expected) -> int:
        """Return the number of an answer that is awaited from now on."""
        number = next(self._numbers)
        self.begin_waiting()
        self.waiting[number] = expected
        return number

    async def _send(self, request: messages.Request, expected: Expected) -> None:
        request.number, request.trace = expected.number, current_request()
        session = self.caller.session()
        if session != self._session:
            self._session = session
            await self.say(messages.Renewed(session))
        await self.say(request)

    async def _run(self) -> None:
        why = "the connection ended"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch)
                    nursery.start_soon(self._say_what_was_put_off)
                    try:
                        await self._receive()
                    except trio.BrokenResourceError as error:
                        why = broken_text(error)
                    except (trio.EndOfChannel, trio.ClosedResourceError):
                        why = "it closed the connection"
                    except BadMessage as error:
                        why = str(error)
                        log.warning("store node %x: %s", self.node, error)
                    nursery.cancel_scope.cancel()
        finally:
            self.close(why)
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._frames.stream)

    async def _receive(self) -> None:
        while True:
            answer = self.caller.codec.decode_answer(await self._frames.receive())
            self.heard += 1
            expected = self.waiting.get(answer.number)
            if expected is not None:
                expected.end(answer)

    async def _watch(self) -> None:
        """Ping the node while calls wait for it, and periodically."""
        timeout_s = self.caller.timeout_s
        look_s = timeout_s / _LOOKS
        heard, began = self.heard, self._began
        heard_at = silent_since = trio.current_time()
        while True:
            self._wake = trio.Event()
            is_awaited = self.waiting or self.watchers
            with trio.move_on_after(look_s if is_awaited else KEEP_ALIVE_S):
                await self._wake.wait()
                await trio.sleep(look_s)
            now = trio.current_time()
            if self.heard != heard:
                heard_at = silent_since = now
            if self._began != began:
                silent_since = now
            heard, began = self.heard, self._began
            is_awaited = self.waiting or self.watchers
            if is_awaited and now - silent_since >= timeout_s:
                why = f"it was silent for {timeout_s:g} s"
                self._silent(why)
                self.close(why)
                return
            if now - heard_at >= timeout_s / 4:
                self.caller.nursery.start_soon(self._ping)
            for expected in self.waiting.values():
                if expected.late_since is None:
                    expected.late_since = now
                elif now - expected.late_since >= expected.limit_s:
                    expected.end(f"it did not answer for {expected.limit_s:g} s")

    async def _ping(self) -> None:
        if len(self.waiting) <= messages.REQUESTS_AT_ONCE:
            with suppress(OSError), Expected(self) as expected:
                await self._send(messages.Ping(), expected)
                await expected.answer(messages.Done)

    async def _say_what_was_put_off(self) -> None:
        while True:
            await self._put_off.wait()
            while self._put_off.is_set():
                self._put_off = trio.Event()
                await trio.sleep(_PUT_OFF_S)
                if self._frames.has_unsent:
                    await self._flush()


def broken_text(error: trio.BrokenResourceError) -> str:
    """Return why a stream broke."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError):
        return describe_tls_error(cause)
    return f"the connection broke ({cause or error})"
