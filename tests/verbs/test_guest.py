"""RDMA on a machine without RDMA: the tests marked verbs, run in a guest whose kernel has it."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from harness import rdma
from harness.guest.kernel import BuildError, build, is_at_hand
from harness.guest_tests import GUEST, GuestTests
from harness.mountpoint import eventually
from harness.roce import find_ways

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the kernel may still be being built
    pytest.mark.skipif(rdma.IN_GUEST, reason="this is a guest already"),
]


@pytest.fixture
def guest_kernel() -> None:
    if not is_at_hand():
        pytest.skip("the guest's kernel is not built; scripts/rdma_guest build takes some minutes")
    try:
        build()  # waits for whoever builds it
    except BuildError as error:
        pytest.skip(f"the guest's kernel cannot be built: {error}")


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [os.fspath(GUEST), *(str(argument) for argument in arguments)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", cwd=cwd
    )


def test_guest_passes_on_output_and_status_and_changes_only_the_directory_it_was_given(
    guest_kernel: None, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    script = f"pwd; echo kept > {given}/file && echo lost > file && cat file; echo err >&2; exit 7"
    done = run("run", "--timeout", 60, "--out", given, "--", "bash", "-c", script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, f"{tmp_path}\nlost\n"), done.stderr
    assert done.stderr == "err\n"
    assert (given / "file").read_text() == "kept\n"
    assert not (tmp_path / "file").exists()


def test_guest_ends_when_its_time_is_over(guest_kernel: None) -> None:
    done = run("run", "--timeout", 2, "--", "sleep", "1000")
    assert done.returncode == 124
    assert "ended after 2 s" in done.stderr


def group_is_gone(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False


def test_nothing_of_a_guest_outlives_whoever_started_it(guest_kernel: None) -> None:
    command = [os.fspath(GUEST), "run", "--timeout", "100", "--", "sh", "-c", "echo up; sleep 1000"]
    with ExitStack() as stack:
        endings = [
            (
                stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)),
                number,
            )
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        ]
        for started, number in endings:
            assert started.stdout is not None
            assert started.stdout.readline() == "up\n"
            children = ("ps", "-o", "pid=", "--ppid", str(started.pid))
            leaders = [int(word) for word in subprocess.check_output(children, text=True).split()]
            assert leaders
            started.send_signal(number)
            for leader in leaders:
                gone = partial(group_is_gone, leader)
                eventually(gone, f"process group {leader} is gone after {number.name}")


def test_two_guests_move_bytes_by_rdma(guest_kernel: None) -> None:
    program = REPOSITORY / "tests/harness/rdma_hosts.py"
    done = run("pair", "--timeout", 100, "--", sys.executable, program)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "[1] what was written was read" in done.stdout


@pytest.mark.timeout(1500)
@pytest.mark.guest_tests
def test_promises_of_verbs_hold_in_a_guest(guest_kernel: None, guest_tests: GuestTests) -> None:
    """Each failure is shown as pytest shows it in the guest."""
    if find_ways():
        pytest.skip("this machine has RDMA: the tests marked verbs ran on it")
    status, output = guest_tests.result()
    if status != 0:
        pytest.fail(f"in the guest:\n{output}", pytrace=False)
    assert re.search(r"\b[1-9]\d* passed", output), output
