"""The programs that mount(8) and umount(8) run for this filesystem: mount.irdmafs and umount.irdmafs.

    mount -t irdmafs SOURCE DIR -o OPTIONS
    umount DIR

Both only translate their arguments into those of `irdmafs mount` and `irdmafs umount`. `irdmafs install`
puts them where mount(8) looks for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from ..mount import mounting
from ..mount_options import MountError, is_for_mount_tools
from .cluster import say
from .command import main, mount

# Exit status of mount(8) and umount(8): it could not be mounted or unmounted.
_FAILED = 32
_NO_SOURCE = frozenset({"none", "irdmafs", "-"})
# Options that the kernel alone obeys, so that a remount can change them.
_REMOUNTED = frozenset(
    {"ro", "rw", "suid", "nosuid", "dev", "nodev", "exec", "noexec", "sync", "async", "dirsync"}
)


@click.command("mount.irdmafs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source")
@click.argument("directory", metavar="DIR")
@click.option("-o", "given", metavar="OPT[,OPT...]", multiple=True, help="Options of irdmafs mount, with "
              "its flags among them: ro,allow_other,size=8G,no-verify.")  # fmt: skip
@click.option("-f", "fake", is_flag=True, help="Do everything but mount.")
@click.option("-s", "-n", "-v", is_flag=True, expose_value=False, help="No effect.")
@click.option("-t", expose_value=False, metavar="TYPE", help="No effect.")
@click.pass_context
def mount_irdmafs(
    ctx: click.Context, source: str, directory: str, given: tuple[str, ...], fake: bool
) -> None:
    """Mount a filesystem for mount(8).

    SOURCE is the file of a cluster (*.toml), the directory of a store, or none: a private tmpfs.
    """
    words = _with_defaults([word for text in given for word in text.split(",") if word])
    try:
        if "remount" in words:
            _remount(directory, words, fake)
            return
        arguments = list(_translated(source, words))
    except MountError as error:
        _fail(ctx, str(error))
    if not fake:
        _run(ctx, "mount", *arguments, "--", directory)


@click.command("umount.irdmafs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("directory", metavar="DIR")
@click.option("-l", "lazy", is_flag=True, help="Detach now; it ends when nobody uses it.")
@click.option("-f", is_flag=True, expose_value=False, help="No effect; see -l.")
@click.option("-n", "-r", "-v", is_flag=True, expose_value=False, help="No effect.")
@click.option("-t", expose_value=False, metavar="TYPE", help="No effect.")
@click.pass_context
def umount_irdmafs(ctx: click.Context, directory: str, lazy: bool) -> None:
    """Unmount a filesystem for umount(8), and wait until its daemon has stored everything."""
    _run(ctx, "umount", *(["--lazy"] if lazy else []), "--", directory)


def _with_defaults(words: list[str]) -> list[str]:
    """Add the options suid and dev, which mount(8) leaves out because they are its defaults. For users
    mount(8) gives nosuid and nodev."""
    if os.geteuid() != 0:
        return words
    return words + [word for word in ("suid", "dev") if f"no{word}" not in words]


def _translated(source: str, words: list[str]) -> Iterator[str]:
    """Yield the flags of `irdmafs mount` for a source and options. Raises MountError for a bad source, and
    for a flag without its value, which would take the word after it."""
    if source not in _NO_SOURCE:
        if "," in source:
            raise MountError(f"the source {source!r} has a comma in it: give a path without one")
        if os.path.isdir(source):
            yield from ("--store", source)
        elif source.endswith(".toml"):
            yield from ("--cluster", source)
        else:
            raise MountError(
                f"{source!r} is nothing to mount: it takes the file of a cluster (*.toml), a directory "
                "that is the store, or none for a private tmpfs"
            )
        # mount(8) recognizes what is mounted already by this name, without symlinks.
        source = os.path.realpath(source)
    yield from ("-o", f"fsname={source}")
    flags = _flags()
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        flag = flags.get(name)
        if flag is None:
            yield from ("-o", word)
        elif flag.is_flag or equals:
            yield f"--{name}={value}" if equals else f"--{name}"
        else:
            raise MountError(f"-o {name} needs a value: {name}=...")


def _flags() -> dict[str, click.Option]:
    """Return the flags of `irdmafs mount` by their names."""
    return {
        flag[2:]: parameter
        for parameter in mount.params
        if isinstance(parameter, click.Option)
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if flag.startswith("--")
    }


def _remount(directory: str, words: list[str], fake: bool) -> None:
    """Change the options of a mount that the kernel obeys. Others stay, and are told."""
    found = mounting.find_mount(directory)
    if found is None or found.fstype != mounting.FSTYPE:
        raise MountError(f"{directory} is no mount of irdmafs that could be remounted")
    # mount(8) adds the options that are in the mount table and in fstab.
    known = {"remount", *_REMOUNTED, *found.options.split(","), *found.super_options.split(",")}
    others = [word for word in words if word not in known and not is_for_mount_tools(word)]
    if not fake:
        mounting.remount(found, [word for word in words if word in _REMOUNTED])
    if others:
        say(
            f"a remount does not change {', '.join(others)}; for that, unmount {directory} and mount "
            "it again",
            err=True,
        )


def _run(ctx: click.Context, *arguments: str) -> None:
    """Run `irdmafs`, and exit with a status of mount(8)."""
    try:
        status: Any = main.main(list(arguments), prog_name="irdmafs", standalone_mode=False)
    except click.ClickException as error:
        _fail(ctx, error.format_message())
    ctx.exit(status or 0)


def _fail(ctx: click.Context, text: str) -> NoReturn:
    say(text, err=True)
    ctx.exit(_FAILED)
