"""Control connections whose calls do not yield to the event loop if they need not wait.

trio's own calls let all other tasks run even if they could return at once. That is a pass of the event
loop, with system calls of its own, and a short exchange would have a dozen of them: more than its own work.
Tasks that serve a peer yield in other places, so that no peer keeps the loop to itself.
"""

import errno
import os
import socket

import trio

_RECEIVE_BYTES = 64 << 10


async def acquire(held: trio.Semaphore | trio.Lock | trio.CapacityLimiter) -> None:
    """Acquire a semaphore, without yielding if it is free."""
    try:
        held.acquire_nowait()
    except trio.WouldBlock:
        await held.acquire()


def let_go(stream: "trio.SSLStream[trio.abc.Stream]") -> None:
    """Free the memory of a TLS connection that has ended. It refers to itself, so its memory (50 to 100
    KiB, most of it OpenSSL's) would wait for the garbage collector, which counts only 21 objects."""
    vars(stream).clear()


class PromptStream(trio.abc.Stream):
    """A connected TCP socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self.socket = sock
        self._may_have_more = False

    def send_now(self, data: memoryview) -> int:
        """Send without waiting, and return how many bytes the kernel accepted. Raises
        trio.BrokenResourceError and trio.ClosedResourceError."""
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._translated(error) from error

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with memoryview(data) as view:
            sent = self.send_now(view)
            while sent < len(view):
                await self.wait_send_all_might_not_block()
                with view[sent:] as rest:
                    sent += self.send_now(rest)

    async def wait_send_all_might_not_block(self) -> None:
        self._check_open()
        await trio.lowlevel.wait_writable(self.socket)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        limit = max_bytes or _RECEIVE_BYTES
        data = await self._receive(limit, 0)
        # If the bytes filled the buffer, more may follow; otherwise there are probably none yet. A task
        # that never has to wait lets other tasks run every second time.
        self._may_have_more = len(data) == limit and not self._may_have_more
        return data

    async def peek(self) -> bytes:
        """Return the first byte that will be received, b"" at the end. Raises as `receive_some`."""
        return await self._receive(1, socket.MSG_PEEK)

    async def _receive(self, limit: int, flags: int) -> bytes:
        self._check_open()
        while True:
            if not self._may_have_more:
                await trio.lowlevel.wait_readable(self.socket)
            try:
                return self.socket.recv(limit, flags)
            except BlockingIOError:
                self._may_have_more = False
            except OSError as error:
                raise self._translated(error) from error

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self.socket.fileno() < 0:
            raise trio.ClosedResourceError("the connection was closed")

    def _translated(self, error: OSError) -> Exception:
        if error.errno == errno.EBADF or self.socket.fileno() < 0:
            return trio.ClosedResourceError("the connection was closed")
        return trio.BrokenResourceError(error.strerror or os.strerror(error.errno or errno.EIO))
