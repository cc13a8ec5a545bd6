"""The programs `irdmafs` (also `python -m irdmafs`), mount.irdmafs and umount.irdmafs."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    with _interrupts_end_silently():
        from .cli.command import main as run
    run(prog_name="irdmafs")


def mount() -> None:
    with _interrupts_end_silently():
        from .cli.mount_helper import mount_irdmafs as run
    run()


def umount() -> None:
    with _interrupts_end_silently():
        from .cli.mount_helper import umount_irdmafs as run
    run()


@contextmanager
def _interrupts_end_silently() -> Iterator[None]:
    """Have Ctrl-C end the process during imports, which take half a second, instead of showing where they
    are. Opens what the caller closed of stdin, stdout and stderr: no other file may get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()
