"""The portable session run by somebody without privileges, through fusermount3."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest
from harness.mount_namespaces import in_new_mount_namespace
from harness.mountpoint import Mount, irdmafs
from harness.patterns import pattern, version_of
from harness.processes import AS_NOBODY_WHO_OPENS_ALL, NOBODY, Process

DEVICE_IS_OPEN = os.path.exists("/dev/fuse") and os.stat("/dev/fuse").st_mode & 0o006 == 0o006

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="no /dev/fuse on this machine"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="not installed: setpriv"),
    pytest.mark.skipif(
        not os.stat(shutil.which("fusermount3") or "/").st_mode & stat.S_ISUID,
        reason="no setuid fusermount3",
    ),
]
needs_open_device = pytest.mark.skipif(
    not DEVICE_IS_OPEN, reason="/dev/fuse is closed to other users; run in a namespace instead"
)
# A device of our own over /dev/fuse, in a mount namespace that nobody else sees.
IN_NAMESPACE = """
device=$(mktemp -u /dev/shm/fuse-XXXXXX)
mknod -m 666 "$device" c 10 229 && mount --bind "$device" /dev/fuse && rm "$device" && exec "$@"
"""


@pytest.mark.skipif(DEVICE_IS_OPEN, reason="/dev/fuse is open to other users: run directly")
def test_all_of_these_where_the_device_is_closed_to_other_users() -> None:
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        in_new_mount_namespace("sh", "-c", IN_NAMESPACE, "sh", *tests),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def nobody() -> Iterator[Process]:
    with Process(launcher=AS_NOBODY_WHO_OPENS_ALL) as one:
        assert one.do("os.getuid()") == NOBODY
        yield one


@needs_open_device
def test_unprivileged_user_mounts_uses_and_unmounts(nobody: Process) -> None:
    with Mount("auto", launcher=AS_NOBODY_WHO_OPENS_ALL) as mount:
        file = str(mount.path / "weights")
        nobody.do("open(file, 'wb').write(pattern(1, 1 << 20))", file=file)
        nobody.do("f = open(file, 'rb')")
        nobody.do("open(file, 'wb').write(pattern(2, 1 << 20))")
        assert nobody.do("version_of(f.read()), version_of(open(file, 'rb').read())") == (1, 2)
        nobody.do("f.close()")
        assert nobody.do("os.stat(file).st_uid") == NOBODY
        status = nobody.do(
            "import json; json.loads(os.getxattr(top, 'user.irdmafs.status'))", top=str(mount.path)
        )
        assert status["session"] == "pyfuse3"
        assert status["session_reason"], "it must say why there is no passthrough"
        denied = irdmafs("status", mount.path)
        assert denied.returncode == 1 and "belongs to another user" in denied.stdout
        mount.unmount()
        assert os.listdir(mount.path) == []
        mount.remount()
        assert nobody.do("version_of(open(file, 'rb').read())") == 2


@needs_open_device
def test_crash_of_an_unprivileged_daemon_is_healed_by_its_user(nobody: Process) -> None:
    with Mount("pyfuse3", launcher=AS_NOBODY_WHO_OPENS_ALL) as mount:
        file = str(mount.path / "weights")
        nobody.do("open(file, 'wb').write(content)", file=file, content=pattern(1, 100_000))
        mount.kill9()
        mount.remount()
        assert version_of(nobody.do("open(file, 'rb').read()")) == 1
