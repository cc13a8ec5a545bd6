"""iperf3 between two hosts of a network."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import click
from harness.network import CommandFailed, Host, run

LIMIT_S = 120.0


def need_iperf3() -> None:
    """Raises ClickException where it is not installed."""
    if shutil.which("iperf3") is None:
        raise click.ClickException("iperf3 is missing: apt install iperf3")


def iperf3(
    sender: Host, receiver: Host, size: int, streams: int, sink: Path | None = None
) -> float:
    """Bytes per second that arrive, and are stored in `sink` if there is one. Raises CommandFailed."""
    store = () if sink is None else ("-F", str(sink))
    server = subprocess.Popen(
        [*receiver.launcher, "iperf3", "-s", "-1", "--forceflush", *store],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    assert server.stdout is not None
    try:
        # It says that it listens on its second line.
        while "Server listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise CommandFailed("iperf3 -s does not start")
        answer = run(
            *(*sender.launcher, "iperf3", "-c", receiver.address, "-J"),
            *("-n", str(size), "-P", str(streams)),
            timeout_s=LIMIT_S,
        )
        found = json.loads(answer)["end"]["sum_received"]
        return float(found["bits_per_second"]) / 8
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        if sink is not None:
            sink.unlink(missing_ok=True)
