"""A mount of a cluster tells Prometheus how it is."""

import re
import urllib.request

import pytest
from conftest import make_mount
from harness.cluster_mount import CLUSTER
from harness.mountpoint import eventually

pytestmark = pytest.mark.timeout(90)


def test_a_mount_serves_metrics_of_its_cache_and_its_session() -> None:
    with make_mount(CLUSTER, "--metrics-port", "0") as mount:
        (mount.path / "file").write_bytes(b"x" * 1000)
        (mount.path / "file").read_bytes()
        eventually(lambda: "metrics are served" in mount.log.read_text(), "metrics are served")
        found = re.search(r"metrics are served on (\S+) port (\d+)", mount.log.read_text())
        assert found is not None
        with urllib.request.urlopen(
            f"http://{found[1]}:{found[2]}/metrics", timeout=10
        ) as response:
            text = response.read().decode()
    samples = dict(
        re.findall(r"^irdmafs_mount_(\w+?)(?:_total)?\{[^}]*\} (\S+)$", text, re.MULTILINE)
    )
    assert float(samples["published_bytes"]) == 1000
    assert float(samples["session_valid_seconds"]) > 0
    assert float(samples["cache_limit_bytes"]) > 0
    assert 'kind="OPEN"' in text
