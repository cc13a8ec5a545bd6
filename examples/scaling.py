#!/usr/bin/env python3
"""How training scales to 10,000 workers by the model of _step_time.py: no cluster is used.

A step computes for --compute seconds on each worker; AdamW trains --parameters in bf16. Curves: store nodes
on the hosts of all workers, as many nodes on hosts of their own, and eight nodes; each beside DiLoCo, which
pushes every hundredth step. Latency and the time to plan a push are assumed: measure them on a cluster, and
set them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import _common
import click
from _step_time import Cluster, Work, step_time

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000, 2_000, 5_000, 10_000)
# bf16 gradients and parameters; the master weight and two moments in fp32.
WIRE_BYTES, STATE_BYTES = 2, 12
POSITIVE, AT_LEAST_0 = click.FloatRange(0, min_open=True), click.FloatRange(0)


@click.command(help=__doc__)
@click.option(
    "--compute", "compute_s", type=POSITIVE, default=1.0, show_default=True, help="Seconds."
)
@click.option("--parameters", type=POSITIVE, default=1e9, show_default=True)
@click.option("--link-gbit", type=POSITIVE, default=200.0, show_default=True,
              help="Of each host, each way.")  # fmt: skip
@click.option("--latency-ms", type=AT_LEAST_0, default=5.0, show_default=True,
              help="Until others see what is published.")  # fmt: skip
@click.option("--plan-us", type=AT_LEAST_0, default=100.0, show_default=True,
              help="Of the coordinator for each push.")  # fmt: skip
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True)
@_common.out_option
def main(
    compute_s: float, parameters: float, link_gbit: float, latency_ms: float, plan_us: float,
    replicas: int, out: Path,
) -> None:  # fmt: skip
    size_bytes = WIRE_BYTES * parameters
    work = Work(compute_s, size_bytes, size_bytes, STATE_BYTES * parameters)

    def cluster(workers: int, nodes: int, colocated: bool) -> Cluster:
        return Cluster(
            workers, nodes, link_gbit * 1e9 / 8, latency_ms / 1e3, colocated,
            min(replicas, nodes), plan_s=plan_us / 1e6,
        )  # fmt: skip

    places: dict[str, Callable[[int], Cluster]] = {
        "on workers' hosts": lambda workers: cluster(workers, workers, True),
        "hosts of their own": lambda workers: cluster(workers, workers, False),
        "eight nodes": lambda workers: cluster(workers, 8, False),
    }
    curves = {}
    for name, place in places.items():
        for sync, every in (("bsp", 1), ("local:100", 100)):
            curves[f"{name}, {sync}"] = [
                (float(workers), step_time(replace(work, every=every), place(workers)).total_s)
                for workers in WORKERS
            ]
    click.echo(f"{'seconds per step, workers':34}" + "".join(f"{count:>9,}" for count in WORKERS))
    for name, points in curves.items():
        click.echo(f"{name:34}" + "".join(f"{seconds:9.3f}" for _, seconds in points))
    _common.save_curves(out, "scaling", "workers", "seconds per step", curves, logarithmic=True)


if __name__ == "__main__":
    main()
