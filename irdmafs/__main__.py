"""The programs `irdmafs` (also `python -m irdmafs`), mount.irdmafs and umount.irdmafs."""

import signal
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
    are."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()
