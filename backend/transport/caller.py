"""The caller's end of one control connection."""

import itertools
import logging
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from ..security import describe_tls_error
from . import Unreachable
from .messages import (
    REQUESTS_AT_ONCE,
    AnyAnswer,
    AnyRequest,
    BadMessage,
    Failed,
    Frames,
    Message,
    Ping,
    Renewed,
    decode_answer,
    error_of,
)

if TYPE_CHECKING:
    from .link import Link
    from .peers import Peers

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
# No answer takes longer: a node that is asked waits for others with limits of its own.
ANSWER_LIMIT_S = 300.0


class ControlClient:
    """The caller's end of one control connection, with any number of calls at once."""

    def __init__(self, peers: "Peers", link: "Link", frames: Frames) -> None:
        self._peers = peers
        self._link = link
        self.node = link.node
        self._frames = frames
        self._session = peers.session()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[trio.Event, list[AnyAnswer]]] = {}
        self._slots = trio.Semaphore(REQUESTS_AT_ONCE - 2)
        self._scope = trio.CancelScope()
        self._why = ""
        self._heard_at = self._asked_at = trio.current_time()
        self._wake = trio.Event()
        self.watchers = 0
        # What hangs on the connection, told why it ended.
        self.closers: list[Callable[[str], None]] = []
        self.is_open = True

    def start(self) -> None:
        self._peers.counters.connections += 1
        self._peers.nursery.start_soon(self._run)

    def close(self, why: str) -> None:
        if self.is_open:
            self.is_open = False
            self._why = why
            self._peers.counters.connections -= 1
            for event, _ in self._waiting.values():
                event.set()
            for close in self.closers:
                close(why)
            self._scope.cancel()

    @property
    def _is_awaited(self) -> bool:
        return bool(self._waiting or self.watchers)

    def watch(self) -> None:
        """Make sure that the node is alive until `watchers` is reduced again."""
        self._begin_waiting()
        self.watchers += 1

    def _begin_waiting(self) -> None:
        if not self._is_awaited:
            self._asked_at = trio.current_time()
            self._wake.set()

    async def ask(self, make: Callable[[int], AnyRequest], group: int = 0) -> AnyAnswer:
        """Raises OSError: Unreachable, or what the node answers."""
        counters = self._peers.counters
        async with self._slots:
            number = next(self._numbers)
            request = make(number)
            counters.requests[type(request).__name__.lower()] += 1
            counters.round_trips += 1
            with trio.move_on_after(ANSWER_LIMIT_S):
                answer = await self._exchange(request)
                if isinstance(answer, Failed):
                    raise error_of(answer.code, answer.node, answer.text, group)
                return answer
        raise Unreachable(self.node, f"it did not answer for {ANSWER_LIMIT_S:g} s")

    async def say(self, message: Message) -> None:
        """Send what has no answer of its own. A connection that breaks is closed."""
        if self.is_open:
            try:
                await self._frames.send(message)
            except trio.BrokenResourceError as error:
                self.close(broken_text(error))
            except trio.ClosedResourceError:
                self.close("the connection was closed")

    async def _exchange(self, request: AnyRequest) -> AnyAnswer:
        event, answers = trio.Event(), list[AnyAnswer]()
        self._begin_waiting()
        self._waiting[request.number] = event, answers
        try:
            # A frame is sent whole or the connection is of no use; `_watch` ends what takes too long.
            with trio.CancelScope(shield=True):
                session = self._peers.session()
                if session != self._session:
                    self._session = session
                    await self.say(Renewed(session))
                await self.say(request)
            if self.is_open:
                await event.wait()
        finally:
            self._waiting.pop(request.number, None)
        if not answers:
            raise Unreachable(self.node, self._why)
        return answers[0]

    async def _run(self) -> None:
        why = "the connection ended"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch)
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
            answer = decode_answer(await self._frames.receive())
            self._heard_at = trio.current_time()
            waiting = self._waiting.get(answer.number)
            if waiting is not None:
                waiting[1].append(answer)
                waiting[0].set()

    async def _watch(self) -> None:
        """Ask the node whether it is alive while somebody waits for it, and now and then."""
        timeout_s = self._peers.timeout_s
        while True:
            self._wake = trio.Event()
            with trio.move_on_after(timeout_s / 4 if self._is_awaited else KEEP_ALIVE_S):
                await self._wake.wait()
                await trio.sleep(timeout_s / 4)
            now = trio.current_time()
            silent_s = now - max(self._heard_at, self._asked_at)
            if self._is_awaited and silent_s >= timeout_s:
                why = f"it was silent for {timeout_s:g} s"
                self._link.silent(why)
                self.close(why)
                return
            if now - self._heard_at >= timeout_s / 4:
                self._peers.nursery.start_soon(self._ping)

    async def _ping(self) -> None:
        if len(self._waiting) <= REQUESTS_AT_ONCE:
            try:
                await self._exchange(Ping(next(self._numbers), ""))
            except Unreachable:
                pass


def broken_text(error: trio.BrokenResourceError) -> str:
    """Why a stream broke."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError):
        return describe_tls_error(cause)
    return f"the connection broke ({cause or error})"
