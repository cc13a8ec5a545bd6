"""The packages that the scripts install are locked: each in one version, by the hashes of its files."""

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKED = {path.stem: path for path in (ROOT / "requirements").glob("*.txt")}


def names(lines: str) -> set[str]:
    found = (re.match(r"[A-Za-z0-9._-]+", line) for line in lines.splitlines())
    return {re.sub(r"[-_.]+", "-", one[0]).lower() for one in found if one}


@pytest.mark.parametrize("name", sorted(LOCKED))
def test_every_requirement_has_one_version_and_hashes(name: str) -> None:
    text = LOCKED[name].read_text().replace("\\\n", "")
    entries = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert entries
    for entry in entries:
        assert re.match(r"[a-z0-9.-]+==\S+ ", entry), entry
        assert "--hash=sha256:" in entry, entry


@pytest.mark.parametrize("extra", ["", "test", "bench"])
def test_what_setup_cfg_wants_is_locked(extra: str) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = names(setup["options"]["install_requires"])
    if extra:
        wanted |= names(setup["options.extras_require"][extra])
    assert wanted <= names(LOCKED[extra or "irdmafs"].read_text())
