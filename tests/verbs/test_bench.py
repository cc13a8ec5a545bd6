"""The bench of the verbs transport works; what it measures is for those who read it."""

import gc
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.clusters import need_cluster
from harness.rdma import need_ports

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from _bench.verbs.command import verbs  # noqa: E402


def bench(*arguments: str) -> object:
    """Run the bench in this process. Return its exit status."""
    with pytest.raises(SystemExit) as ended:
        verbs.main(list(arguments), "bench verbs")
    gc.enable()  # which measurements do without
    return ended.value.code


def test_the_bench_finds_the_python_that_has_irdmafs() -> None:
    if not (SCRIPTS.parent / ".venv").exists():
        pytest.skip("irdmafs is not installed into .venv")
    python = Path(sys.base_prefix) / "bin" / "python3"  # the one that .venv was made of
    done = subprocess.run([python, SCRIPTS / "bench", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done
    assert "Measure irdmafs" in done.stdout


def test_wrong_usage_is_told() -> None:
    assert bench("--only", "speed") == 2


@pytest.mark.verbs
@pytest.mark.slow
def test_the_bench_runs_and_tells_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    need_ports()
    need_cluster()
    parts = []
    beside_perftest = shutil.which("ib_write_bw") is not None
    beside_grpc = importlib.util.find_spec("grpc") is not None
    if beside_perftest:
        parts += ["bandwidth", "posix", "buffer", "latency"]
    if beside_grpc:
        parts += ["cpu"]
    only = ",".join(parts)
    arguments = ("--quick", "--rounds", "1", "--sizes", "64K,1M", "--only", only, "--json")
    assert bench(*arguments) == 0
    figures = json.loads(capsys.readouterr().out)
    all_rows = {f"{way}-{size}" for way in ("write", "read") for size in (64 << 10, 1 << 20)}
    if beside_perftest:
        assert figures["device"].keys() == figures["mount"].keys() == all_rows
        assert figures["buffer"].keys() == {f"read-{1 << 20}"}  # no part of what is small
        row = figures["device"][f"write-{1 << 20}"]
        assert len(row["device"]) == len(row["perftest"]) == 1
        assert row["ratio"] > 0
        assert figures["latency"].keys() == {"get", "one_sided", "ib_read_lat"}
    if beside_grpc:
        contenders = ("verbs", "TCP", "gRPC, one message")
        assert figures["cpu"].keys() == {
            f"{way}, {one}" for way in ("write", "read") for one in contenders
        }
