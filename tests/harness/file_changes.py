"""The ways in which programs give a file something new."""

from pathlib import Path


def publish(path: Path) -> None:
    path.write_bytes(b"newer")


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" and more")


def replace(path: Path) -> None:
    aside = path.with_name("aside")
    aside.write_bytes(b"whole")
    aside.rename(path)
