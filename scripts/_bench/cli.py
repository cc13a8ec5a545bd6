"""One command for every measurement."""

from __future__ import annotations

import click

from .cluster import cluster
from .command import SETTINGS
from .peers import peers
from .posix import posix
from .soak import soak
from .train import train
from .verbs.command import verbs
from .verify import verify
from .workers import worker


@click.group(context_settings=SETTINGS)
def main() -> None:
    """Measure irdmafs beside what is comparable. Run it on a quiet machine, mostly as root."""


for _command in (posix, cluster, peers, verify, verbs, train, soak, worker):
    main.add_command(_command)
