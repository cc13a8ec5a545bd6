"""The `irdmafs` command, which loses etcd's answer about one version when it is sent SIGUSR2: it is
published, and who publishes it cannot know."""

import errno
import signal
from typing import Any

from irdmafs.backend.namespace import Namespace
from irdmafs.cli.command import main

SIGNAL = signal.SIGUSR2


def lose_answers() -> None:
    """To the next version that is published after the signal."""
    loses = False
    publish = Namespace.publish

    async def publish_and_lose(self: Namespace, *arguments: Any, **more: Any) -> Any:
        nonlocal loses
        published = await publish(self, *arguments, **more)
        if loses:
            loses = False
            raise OSError(errno.ETIMEDOUT, "the answer was lost")
        return published

    def lose_next(*_: object) -> None:
        nonlocal loses
        loses = True

    Namespace.publish = publish_and_lose  # type: ignore[method-assign]
    signal.signal(SIGNAL, lose_next)


if __name__ == "__main__":
    lose_answers()
    main(prog_name="irdmafs")
