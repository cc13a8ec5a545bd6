"""The `irdmafs` command, whose next content after SIGUSR2 gets a number of the session before: as if that
had ended while a copy was made."""

import signal

from irdmafs.backend.cluster.records import CONTENT_NUMBER_BITS, ContentId
from irdmafs.backend.store.remote.numbers import ContentNumbers
from irdmafs.cli.command import main

SIGNAL = signal.SIGUSR2


def end_sessions() -> None:
    """At each signal."""
    ended = False
    new = ContentNumbers.new

    def new_of_ended(self: ContentNumbers) -> ContentId:
        nonlocal ended
        number, was, ended = new(self), ended, False
        return ContentId(number - (1 << CONTENT_NUMBER_BITS)) if was else number

    def end_session(*_: object) -> None:
        nonlocal ended
        ended = True

    ContentNumbers.new = new_of_ended  # type: ignore[method-assign]
    signal.signal(SIGNAL, end_session)


if __name__ == "__main__":
    end_sessions()
    main(prog_name="irdmafs")
