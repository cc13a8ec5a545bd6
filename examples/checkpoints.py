#!/usr/bin/env python3
"""Checkpoints of torch.distributed that many ranks save together, on any hosts: each appears whole.

The ranks write into one draft, which the coordinator publishes as the next version when all have written
(docs/weight-sync.md). A loader holds the version that it loads, so no rotation takes it away. `Writer` is
all that a program needs: `dcp.save(state, storage_writer=Writer(directory))`, and likewise async_save.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _common
import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from irdmafs import client


class _Failed(Exception):
    """The save before this one did."""


class Writer(dcp.FileSystemWriter):
    """Saves each checkpoint as the next version in a directory, of which the `keep` newest stay."""

    def __init__(self, directory: str | Path, *, keep: int = 3, **options: Any) -> None:
        super().__init__(directory, **options)
        self.versions = client.Versions(directory, keep=keep)
        self._draft = ExitStack()  # of the coordinator

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        self.path = self.fs.init_path(self.versions.directory)
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        with suppress(_Failed), self._draft:
            raise _Failed  # nothing of an earlier save that did not finish is published
        draft = self._draft.enter_context(self.versions.draft())
        plans = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=(draft, plan.storage_data)) for plan in plans]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        draft, data = plan.storage_data
        self.path = self.fs.init_path(draft)
        return super().write_data(replace(plan, storage_data=data), planner)

    def finish(self, metadata: dcp.Metadata, results: list[list[Any]]) -> None:
        with self._draft:
            super().finish(metadata, results)


RANKS = 2


def work(directory: Path, steps: int, size: int, number: int) -> str:
    """Be one of the ranks, which save, or a loader."""
    return (save if number < RANKS else load)(directory, steps, size, number)


def save(directory: Path, steps: int, size: int, rank: int) -> str:
    """Save a model of which each rank has a part."""
    store = dist.FileStore(str(directory / "ranks"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    writer = Writer(directory)
    for step in range(1, steps + 1):
        dcp.save({f"part{rank}": torch.full((size,), float(step))}, storage_writer=writer)
    dist.destroy_process_group()
    return f"rank {rank}: {steps} versions saved"


def load(directory: Path, last: int, size: int, number: int) -> str:
    """Load versions up to the last one."""
    versions, seen, loaded, mixed = client.Versions(directory), 0, 0, 0
    while seen < last:
        with versions.hold(newer_than=seen, timeout=_common.TIMEOUT_S, local=True) as version:
            state: dict[str, Any] = {f"part{rank}": torch.empty(size) for rank in range(RANKS)}
            dcp.load(state, storage_reader=dcp.FileSystemReader(version.path), no_dist=True)
            seen, loaded = version.number, loaded + 1
            mixed += any(bool((part != seen).any()) for part in state.values())
    return f"loader: {loaded} of {last} versions loaded, {mixed} mixed"


@click.command()
@_common.directory_argument
@click.option("--steps", default=10, show_default=True, help="Versions that the ranks save.")
@click.option("--size", default=1 << 20, show_default=True, help="Parameters of each rank.")
def main(directory: Path | None, steps: int, size: int) -> None:
    with _common.place(directory) as place:
        for told in _common.in_processes(partial(work, place, steps, size), RANKS + 1):
            click.echo(told)


if __name__ == "__main__":
    main()
