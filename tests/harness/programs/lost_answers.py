"""Runs the `irdmafs` command, which loses the answer of etcd about one version after the signal: it is
published, and who publishes it cannot know."""

import errno
import sys
from pathlib import Path
from typing import Any

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.at_signal import told_once
from irdmafs.backend.namespace import Namespace
from irdmafs.cli.command import main


def lose_answers() -> None:
    """To the next version that is published after the signal."""
    loses = told_once()
    publish = Namespace.publish

    async def publish_and_lose(self: Namespace, *arguments: Any, **more: Any) -> Any:
        published = await publish(self, *arguments, **more)
        if loses():
            raise OSError(errno.ETIMEDOUT, "the answer was lost")
        return published

    Namespace.publish = publish_and_lose  # type: ignore[method-assign]


if __name__ == "__main__":
    lose_answers()
    main(prog_name="irdmafs")
