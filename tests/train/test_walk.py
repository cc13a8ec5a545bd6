"""The walk of docs/training.md works as it is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="mounts")
def test_walk_from_a_mount_to_a_trained_model(tmp_path: Path) -> None:
    walk = (
        PAGE.read_text().partition("## From a mount to a trained model\n")[2].partition("\n## ")[0]
    )
    script = []
    for kind, text in BLOCK.findall(walk):
        if kind == "sh":
            script.append(text)
        else:
            (tmp_path / text.split()[1]).write_text(text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        done = subprocess.run(
            ["bash", "-e", "-c", "".join(script)], cwd=tmp_path, env={**os.environ, "PATH": path},
            capture_output=True, text=True, timeout=110,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        if os.path.ismount(tmp_path / "params"):
            command = [sys.executable, "-m", "irdmafs", "umount", "--discard"]
            subprocess.run([*command, str(tmp_path / "params")], check=True)
    slope, offset = re.findall(r"'(?:slope|offset)': array\(\[(\S+)\]", done.stdout)
    found = sorted(float(one) for one in (slope, offset))
    assert np.allclose(found, [1, 3], atol=0.1)
    assert load_file(tmp_path / "version1.safetensors")["slope"] == pytest.approx(found[1] + 1)
