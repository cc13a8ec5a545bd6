"""Runs the `irdmafs` command, which takes in the answer of etcd about one version only when it is told: the
first signal announces that, the second one ends it. Meanwhile the replica has the version already."""

import sys
from pathlib import Path
from typing import Any

import trio

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.at_signal import told_once
from irdmafs.backend.namespace import Namespace
from irdmafs.cli.command import main

# How often the second signal is looked for.
_LOOK_S = 0.01


def delay_answers() -> None:
    """That about the next version that is published after the signal."""
    told = told_once()
    publish = Namespace.publish

    async def publish_and_wait(self: Namespace, *arguments: Any, **more: Any) -> Any:
        published = await publish(self, *arguments, **more)
        if told():
            while not told():
                await trio.sleep(_LOOK_S)
        return published

    Namespace.publish = publish_and_wait  # type: ignore[method-assign]


if __name__ == "__main__":
    delay_answers()
    main(prog_name="irdmafs")
