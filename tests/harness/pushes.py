"""A check of pushes that does what the push says, and a mount whose pushes are checked by it.

A push that begins with "bad " is refused with the rest of its first line as reason. One that begins with
"ask " and the path of a FIFO gets the verdict that a test writes there: "fine", or a reason.
"""

import errno
import os
import sys
from functools import partial
from pathlib import Path

# Mounts in the place of `irdmafs`.
COMMAND = (sys.executable, __file__, "irdmafs")


def check(directory: Path, fd: int, name: str) -> None:
    """Check as described above, and look at the directory on the mount, as a real check does."""
    assert name.partition("/")[0] in os.listdir(directory / ".train" / "push")
    kind, _, rest = os.pread(fd, 4096, 0).decode().partition("\n")[0].partition(" ")
    if kind == "bad":
        raise OSError(errno.EINVAL, rest)
    if kind == "ask":
        while not (verdict := Path(rest).read_text()):
            pass  # it was opened for a check whose process was killed
        if verdict != "fine":
            raise OSError(errno.EINVAL, verdict)


def main(arguments: list[str]) -> None:
    """Run the command `irdmafs` with mounts that check by this module."""
    from irdmafs.cli.command import main as irdmafs
    from irdmafs.mount import daemon
    from irdmafs.mount.push_checker import PushChecker

    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    setattr(daemon, PushChecker.__name__, partial(PushChecker, module="harness.pushes"))
    irdmafs(arguments, prog_name="irdmafs")


if __name__ == "__main__":
    main(sys.argv[2:])
