"""Runs the `irdmafs` command. Its next content after the signal gets a number of the session before: that
may have ended while a copy was made."""

import sys
from pathlib import Path

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.at_signal import told_once
from irdmafs.backend.model.records import CONTENT_NUMBER_BITS, ContentId
from irdmafs.backend.store.remote.contents import Contents
from irdmafs.cli.command import main


def end_sessions() -> None:
    """At each signal."""
    has_ended = told_once()
    new = Contents._new_number

    def new_of_ended(self: Contents) -> ContentId:
        number = new(self)
        return ContentId(number - (1 << CONTENT_NUMBER_BITS)) if has_ended() else number

    Contents._new_number = new_of_ended  # type: ignore[method-assign]


if __name__ == "__main__":
    end_sessions()
    main(prog_name="irdmafs")
