"""The examples that train with torch reach what they claim, run small."""

import re
from pathlib import Path

import pytest
from harness.example_programs import needs, run

pytestmark = needs("torch")


@needs("sklearn")
@pytest.mark.slow
def test_images_are_recognized_with_and_without_waiting_for_each_other(
    place: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ("--workers=2", "--steps=30", "--lr=0.01", "--sync=bsp", "--sync=async")
    printed = run("images.py", place / "run", *arguments, f"--out={out}")
    found = dict(re.findall(r"^(\S+) .* accuracy (\S+)$", printed, re.MULTILINE))
    assert found.keys() == {"bsp", "async"}
    # A guess is right once in ten times.
    assert all(float(accuracy) > 0.8 for accuracy in found.values())
    for y in ("loss", "accuracy"):
        for x in ("seconds", "bytes"):
            rows = (out / f"images-{y}-{x}.csv").read_text().splitlines()
            assert rows[0] == f"curve,{x},{y}"
            assert len(rows) == 1 + 2 * 6


@pytest.mark.slow
def test_language_is_learnt_with_fewer_bytes_by_diloco(place: Path, tmp_path: Path) -> None:
    arguments = ("--steps=40", "--every=20", "--rounds=2", f"--out={tmp_path / 'out'}")
    printed = run("language.py", place / "run", *arguments)
    found = re.findall(r"^(\S+) .* (\S+) MB, loss (\S+)$", printed, re.MULTILINE)
    (_, bytes_each_step, loss), (name, bytes_seldom, loss_seldom) = found
    assert name == "DiLoCo"
    assert float(bytes_each_step) == pytest.approx(20 * float(bytes_seldom), rel=0.01)
    # A guess has 4.6.
    assert float(loss) < 3.2
    assert float(loss_seldom) < 3.2
    assert (tmp_path / "out" / "language-bytes.csv").read_text().startswith("curve,bytes,loss\n")
