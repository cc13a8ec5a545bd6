"""Pages, modules, tests and classes that the documentation names exist. What is installed is locked."""

import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = ("backend", "irdmafs", "tests", "scripts")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
QUOTED = re.compile(r"`([^`\n]+)`")
# What is a file of the project by its form: a module or page, or anything below a directory of ours.
FILE = re.compile(r"[\w./-]+\.(?:py|md)|(?:backend|irdmafs|docs|tests|scripts)/[\w./-]+")
PAGE = re.compile(r"docs/[\w-]+\.md")
CLASS = re.compile(r"^(?:class |(?=\w+ = NewType))(\w+)", re.MULTILINE)


def text_of(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link, anchor in LINK.findall(text_of(page)):
        if "://" not in link:
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            headings = HEADING.findall(text_of(target)) if anchor else ()
            # As GitHub makes what headings are linked by.
            anchors = {re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings}
            assert not anchor or anchor in anchors, f"{page.name} has {link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for name in QUOTED.findall(text_of(page)):
        if FILE.fullmatch(name):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_page_is_reached_from_the_design() -> None:
    links = {link for link, _ in LINK.findall((ROOT / "docs" / "design.md").read_text())}
    pages = {page.name for page in PAGES if page.parent != ROOT} - {"design.md"}
    assert pages <= links


def test_pages_that_modules_name_exist() -> None:
    for module in modules():
        for name in PAGE.findall(module.read_text()):
            assert (ROOT / name).exists(), f"{module.relative_to(ROOT)} names {name}"


def test_words_of_the_design_are_names_in_the_code() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    words = text.partition("## Words\n")[2]
    known = {name for module in modules() for name in CLASS.findall(module.read_text())}
    named = {
        name for row in words.splitlines() for name in QUOTED.findall(row.rpartition(" | ")[2])
    }
    assert named, "the glossary has a column of classes"
    assert named <= known, f"no classes: {named - known}"


def test_rooms_of_the_design_are_directories_and_modules() -> None:
    """The map of the rooms names what there is, and every package that there is."""
    text = (ROOT / "docs" / "design.md").read_text()
    rooms = text.partition("## Rooms\n```\n")[2].partition("```")[0]
    packages = {
        path.parent.relative_to(ROOT / place).parts[0]
        for place in ("backend", "irdmafs")
        for path in (ROOT / place).rglob("__init__.py")
        if path.parent != ROOT / place
    }
    named = set(re.findall(r"(\w+)/", rooms))
    assert packages - {"backend"} <= named, f"not in the map: {packages - named}"


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
