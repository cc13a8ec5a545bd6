"""One command for every measurement."""

from __future__ import annotations

import click

from .arithmetic import train_arithmetic
from .cluster import cluster
from .command import SETTINGS
from .memory import memory
from .peers import peers
from .posix import posix
from .soak import soak
from .train import train
from .train_overlap import train_overlap
from .train_scaling import train_scaling
from .train_verbs import train_verbs
from .training import training
from .transport import transport
from .verbs.command import verbs
from .verify import verify
from .workers import worker


@click.group(context_settings=SETTINGS)
def main() -> None:
    """Measure irdmafs beside what is comparable. Run it on a quiet machine, mostly as root."""


for _command in (
    posix, memory, cluster, peers, transport, verify, verbs, train, training, train_arithmetic,
    train_overlap, train_scaling, train_verbs, soak, worker,
):  # fmt: skip
    main.add_command(_command)
