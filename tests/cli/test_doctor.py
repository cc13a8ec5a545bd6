"""The doctor tries things on the real machine and leaves it as it was."""

import json
import os
import re
import tempfile
from pathlib import Path

import pytest
from harness.mount_namespaces import in_new_mount_namespace
from harness.mountpoint import irdmafs, needs_fuse, one_line
from harness.processes import AS_NOBODY, AS_NOBODY_WHO_OPENS_ALL, WHO_OPENS_ALL, as_user

from irdmafs.backend.model.values import human_bytes
from irdmafs.cli import status
from irdmafs.doctor import machine as doctor
from irdmafs.mount import mounting

# Make /dev/fuse root's own in a mount namespace, and run a command there.
_SHUT = (
    "mount -t tmpfs none /mnt && mknod -m 600 /mnt/fuse c 10 229 && mount --bind /mnt/fuse /dev/fuse && "
    'exec "$@"'
)


def test_examination_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def traces() -> tuple[set[str], set[str]]:
        points = {mount.mountpoint for mount in mounting.mounts()}
        left = {point for point in points if point.startswith(str(tmp_path))}
        return left, {path.name for path in tmp_path.iterdir()}

    # The first import of a library may keep a descriptor.
    doctor.examine()
    descriptors = len(os.listdir("/proc/self/fd"))
    doctor.examine()
    assert traces() == (set(), set())
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_is_wrong_comes_with_a_remedy() -> None:
    for check in doctor.examine().checks:
        assert check.found
        assert check.remedy or check.verdict in ("ok", "info"), check


def test_json_says_what_the_page_says() -> None:
    done = irdmafs("doctor", "--json")
    data = json.loads(done.stdout)
    assert done.returncode == (0 if data["ok"] else 1)
    assert data["ok"] == bool(data["sessions"])
    page = irdmafs("doctor")
    assert page.returncode == done.returncode
    for check in data["checks"]:
        assert check["name"] in page.stdout


@needs_fuse
def test_passthrough_is_really_negotiated() -> None:
    offered, works = doctor.negotiate_passthrough()
    if not offered:
        pytest.skip("this kernel offers no passthrough")
    assert works
    found = doctor.examine()
    assert found.passthrough
    assert found.sessions == ("kernel", "pyfuse3")


@needs_fuse
def test_machine_without_fuse_fails_with_the_remedy() -> None:
    hide = 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && exec "$@"'
    launcher = in_new_mount_namespace("sh", "-c", hide, "sh")
    done = irdmafs("doctor", "--json", launcher=(*launcher,))
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert data["sessions"] == []
    checks = {check["name"]: check for check in data["checks"]}
    assert checks["/dev/fuse"]["verdict"] == checks["passthrough"]["verdict"] == "fail"
    assert "modprobe fuse" in checks["/dev/fuse"]["remedy"]


@needs_fuse
@pytest.mark.parametrize("command", ["doctor", "mount"])
@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        (("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all"), "--cap-add SYS_ADMIN"),
        ((*AS_NOBODY, "--no-new-privs"), "without no_new_privs"),
        ((*as_user(4242), *WHO_OPENS_ALL), "give the user one in /etc/passwd"),
        (in_new_mount_namespace("sh", "-c", _SHUT, "sh", *AS_NOBODY), "chmod 666 /dev/fuse"),
    ],
)  # fmt: skip
def test_a_process_whose_helper_cannot_mount_is_told_why(
    launcher: tuple[str, ...], said: str, command: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can take so much away")
    if command == "doctor":
        done = irdmafs("doctor", launcher=launcher)
        assert said in done.stdout
        assert "irdmafs cannot mount here" in done.stdout
        assert done.returncode == 1
    else:
        with tempfile.TemporaryDirectory() as place:
            os.chmod(place, 0o777)
            line = one_line(irdmafs("mount", place, launcher=launcher))
        assert re.search(
            r"(3: could not determine username|mount failed: Operation not|/dev/fuse: Permission)",
            line,
        )
        assert "`irdmafs doctor`" in line


def test_unprivileged_user_is_told_what_privilege_would_give() -> None:
    launcher = AS_NOBODY_WHO_OPENS_ALL if os.geteuid() == 0 else ()
    done = irdmafs("doctor", "--json", launcher=launcher)
    data = json.loads(done.stdout)
    assert "kernel" not in data["sessions"]
    assert not data["passthrough"]
    checks = {check["name"]: check for check in data["checks"]}
    assert "CAP_SYS_ADMIN" in checks["passthrough"]["found"]
    assert checks["passthrough"]["verdict"] == "warn"
    assert done.returncode == (0 if data["sessions"] else 1)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"),
     (102_399, "100 KiB"), ((1 << 30) - 1, "1.0 GiB"), (3 << 50, "3072 TiB"), (None, "-")],
)  # fmt: skip
def test_bytes_are_written_for_people(count: int | None, text: str) -> None:
    assert human_bytes(count) == text


DURATIONS = {0: "0 s", 59.9: "59 s", 3600: "1 h", 7500: "2 h 5 min", 273600: "3 d 4 h", "": "-"}


@pytest.mark.parametrize(("seconds", "text"), DURATIONS.items())
def test_durations_are_written_for_people(seconds: float | str, text: str) -> None:
    assert status.human_duration(seconds) == text
