"""Runs the `irdmafs` command, which misbehaves once after each signal."""

import errno
import signal
from collections import Counter
from collections.abc import Iterable
from typing import Any

import trio

from irdmafs.backend.model.records import CONTENT_NUMBER_BITS, ContentId
from irdmafs.backend.namespace import Namespace
from irdmafs.backend.store.remote import replication, writer
from irdmafs.backend.store.remote.cluster import Cluster
from irdmafs.backend.store.remote.contents import Contents
from irdmafs.cli.command import main

# It loses the answer of etcd about the next version: that is published, and who publishes it cannot know.
LOSE = signal.SIGRTMIN
# It takes that answer in only when the signal comes again. Meanwhile the replica has the version already.
DELAY = signal.SIGRTMIN + 1
# Its next content gets a number of the session before, which may have ended while a copy was made.
END_SESSION = signal.SIGRTMIN + 2
# Its session ends, and another one begins, when nodes have the next contents that it sends together.
END_SESSION_LATE = signal.SIGRTMIN + 3

# How often the second signal is looked for.
_LOOK_S = 0.01
_told = Counter[int]()


def _take(number: int) -> bool:
    """Return whether a signal came: once for each time that it did."""
    came = _told[number] > 0
    _told[number] -= came
    return came


def misbehave() -> None:
    publish, new_number = Namespace.publish, Contents._new_number
    put_together = writer.put_together

    async def publish_and_hear(self: Namespace, *arguments: Any, **more: Any) -> Any:
        published = await publish(self, *arguments, **more)
        if _take(LOSE):
            raise OSError(errno.ETIMEDOUT, "the answer was lost")
        if _take(DELAY):
            while not _take(DELAY):
                await trio.sleep(_LOOK_S)
        return published

    def number_of_ended(self: Contents) -> ContentId:
        number = new_number(self)
        return ContentId(number - (1 << CONTENT_NUMBER_BITS)) if _take(END_SESSION) else number

    async def put_and_end_session(cluster: Cluster, transfers: Iterable[writer.Transfer]) -> None:
        await put_together(cluster, transfers)
        if _take(END_SESSION_LATE):
            ended = cluster.session.number
            await cluster.engine.leases.revoke(cluster.session.lease)
            cluster.session.lose()
            while cluster.session.number == ended or not cluster.session.valid():
                await trio.sleep(_LOOK_S)

    replication.put_together = put_and_end_session  # type: ignore[attr-defined]
    Namespace.publish = publish_and_hear  # type: ignore[method-assign]
    Contents._new_number = number_of_ended  # type: ignore[method-assign]
    for one in (LOSE, DELAY, END_SESSION, END_SESSION_LATE):
        signal.signal(one, lambda number, _: _told.update([number]))


if __name__ == "__main__":
    misbehave()
    main(prog_name="irdmafs")
