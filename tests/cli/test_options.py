"""A setting is declared once: its flag, its key and its line in docs/options.md come from there."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner

from irdmafs.backend.cluster.config_sections import SECTIONS
from irdmafs.backend.model.options import declare, declared
from irdmafs.backend.model.values import Seconds, Size
from irdmafs.cli.command import main, mount
from irdmafs.cli.flags import flag_name, flags_of, overrides, section_flags
from irdmafs.cli.serve import serve
from irdmafs.mount_options import FORMS, MountOptions, Switch

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


@dataclass(frozen=True, kw_only=True)
class Plain:
    depth: int = declare(3, "How deep")
    colour: Literal["red", "blue"] = declare("red", "Which", short="-c")
    bright: bool = declare(True, "Whether it shines")
    internal: int = 0


@dataclass(frozen=True, kw_only=True)
class Section:
    depth: int = declare(3, "How deep", commands=("try",))
    room: Size | None = declare(None, "How large", commands=("try",))
    pause: Seconds = declare(Seconds(90), "How long", commands=("try",))
    names: tuple[str, ...] = declare((), "Which", commands=("try",), commas=True)
    places: tuple[str, ...] = declare((), "Where", commands=("try",))
    hidden: str = declare("", "A key of the file that has no flag")


def run(command: click.Command, *arguments: str) -> str:
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    return done.output.strip()


def options_of(command: click.Command) -> Iterator[click.Option]:
    for part in command.commands.values() if isinstance(command, click.Group) else ():
        yield from options_of(part)
    yield from (one for one in command.params if isinstance(one, click.Option))


def test_every_option_of_every_command_says_what_it_is_for() -> None:
    silent = [one.opts for one in options_of(main) if not (one.help or "")[:1].isalpha()]
    assert silent == []


def test_a_declared_setting_has_a_flag_of_its_type_and_shows_its_default() -> None:
    seen: dict[str, object] = {}

    @click.command()
    @flags_of(Plain)
    def command(**values: object) -> None:
        seen.update(values)

    run(command)
    assert seen == {"depth": 3, "colour": "red", "bright": True}
    run(command, "--depth", "7", "-c", "blue", "--no-bright")
    assert seen == {"depth": 7, "colour": "blue", "bright": False}
    page = run(command, "--help")
    for shown in ("[red|blue]", "[default: 3]", "[default: --bright]"):
        assert shown in page
    assert "internal" not in page


def test_a_flag_overrides_a_key_and_its_absence_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "added", Section)
    seen: dict[str, dict[str, object]] = {}

    @click.command()
    @section_flags("try", "With --cluster: ")
    def command(**values: object) -> None:
        seen.update(overrides(values))

    run(command, "--depth", "7", "--pause", "5m", "--names", "a, b", "--places", "x,y")
    assert seen["added"] == {
        "depth": 7, "room": None, "pause": "5m", "names": ["a", "b"], "places": ("x,y",)
    }  # fmt: skip
    page = run(command, "--help")
    for shown in ("With --cluster: how deep", "--room SIZE", "[default: 90s]"):
        assert shown in page
    assert "--hidden" not in page


def test_keys_have_flags_of_serve_and_mount() -> None:
    for name, command in (("serve", serve), ("mount", mount)):
        known = {parameter for one in command.params for parameter in one.opts}
        for section, owner in SECTIONS.items():
            for setting in declared(owner):
                flag = flag_name(section, setting.name)
                if name in setting.option.commands:
                    assert flag in known, f"{flag} of {name}"


def test_every_setting_says_what_it_means() -> None:
    for owner in SECTIONS.values():
        names = {setting.name for setting in declared(owner)}
        assert names == set(owner.__dataclass_fields__), owner
        for setting in declared(owner):
            assert setting.option.help[0].isupper() and setting.option.help[-1] != "."


def test_documented_options_are_those_that_there_are() -> None:
    """docs/options.md is complete: a table for each group of settings, as they are declared."""
    page = PAGE.read_text()
    for table in tables():
        assert table in page, f"docs/options.md lacks this table:\n\n{table}"
    in_tables = {line for table in tables() for line in table.splitlines()}
    rows = {line for line in page.splitlines() if line.startswith("|")}
    assert rows == in_tables, f"docs/options.md has more than there is: {rows - in_tables}"


def tables() -> Iterator[str]:
    yield table(("flag of `mount`", "default", "meaning"), mount_flags())
    yield table(("option", "default", "meaning"), dash_o())
    for section, owner in SECTIONS.items():
        rows = []
        for setting in declared(owner):
            commands = ", ".join(f"`{name}`" for name in setting.option.commands)
            flag = f", `{flag_name(section, setting.name)}` of {commands}" if commands else ""
            rows.append((f"`{setting.name}`{flag}", setting.shown_default, setting.option.help))
        yield table((f"key of `[{section}]`, flag", "default", "meaning"), rows)


def mount_flags() -> Iterator[tuple[str, ...]]:
    """Yield the flags that are no keys of the file, as the command itself knows them."""
    for one in mount.params:
        if isinstance(one, click.Option) and "__" not in (one.name or ""):
            help_text, _, default = (one.help or "").partition("  [default: ")
            kind = one.metavar or (
                "" if one.is_flag else "|".join(getattr(one.type, "choices", ()))
            )
            names = f"{', '.join(sorted(one.opts))} {kind}".strip()
            yield f"`{names}`", default.rstrip("]"), help_text.removesuffix(".")


def dash_o() -> Iterator[tuple[str, ...]]:
    defaults = MountOptions()
    for name, form in FORMS.items():
        default = getattr(defaults, name)
        if isinstance(form, Switch):
            words = ", ".join(f"`{word}`" for word, _ in form.words(name))
            is_set = form.on if default else form.off or "off"
            yield words, str(is_set), form.help
        else:
            shown = {None: "", True: "on"}.get(default, str(default))
            yield f"`{name}=` {form.expected}", shown, form.help


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", r"\|") or "-"
