"""The examples that train with torch reach what they claim, run small."""

import re
from pathlib import Path

from example_programs import needs, run

pytestmark = needs("torch")


@needs("sklearn")
def test_images_are_recognized_with_and_without_waiting_for_each_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--workers=2", "--steps=60", "--sync=bsp", "--sync=async", f"--out={out}")
    printed = run("images.py", tmp_path / "run", *arguments)
    found = dict(re.findall(r"^(\S+) .* accuracy (\S+)$", printed, re.MULTILINE))
    assert found.keys() == {"bsp", "async"}
    # A guess is right once in ten times.
    assert all(float(accuracy) > 0.8 for accuracy in found.values())
    for y in ("loss", "accuracy"):
        for x in ("seconds", "bytes"):
            rows = (out / f"images-{y}-{x}.csv").read_text().splitlines()
            assert rows[0] == f"curve,{x},{y}"
            assert len(rows) == 1 + 2 * 12
