"""What a training loop costs a cluster's mounts: registrations, and bytes that Python touches."""

from __future__ import annotations

import statistics

import click
from harness.cluster import MIB, Cluster, Plan
from harness.roce import find_way
from harness.training import train

from .command import SETTINGS, measuring


@click.command(context_settings=SETTINGS)
@click.option("--versions", default=200, show_default=True)
@click.option("--size", "size_mib", default=100, show_default=True, help="MiB of the model.")
@click.option("--replicas", default=1, show_default=True)
def training(versions: int, size_mib: int, replicas: int) -> None:
    """Run a training loop and count registrations, and bytes that Python touches.

    One mount saves version after version of a model with numpy.save, another loads each. To be run where
    there is an RDMA device, or in a guest: scripts/rdma_guest run --memory 4G -- scripts/bench training
    """
    with measuring():
        plan = Plan(
            nodes=replicas, mounts=0, namespaces=False, replicas=replicas, lease_ttl_s=20,
            node_config={"listen": find_way().address},
            store_bytes=4 * size_mib * MIB, cache_bytes=3 * size_mib * MIB,
        )  # fmt: skip
        with Cluster(plan) as cluster:
            trainer, worker = (cluster.add_mount("--rdma", "require") for _ in range(2))
            first, *others = train(trainer, worker, versions, size_mib * MIB)
    click.echo(
        f"first version: {first.saved.registrations} and {first.loaded.registrations} registrations"
    )
    click.echo(f"{len(others)} versions after it, of {size_mib} MiB, all together:")
    for title, of, took in (
        ("saving", [each.saved for each in others], [each.save_s for each in others]),
        ("loading", [each.loaded for each in others], [each.load_s for each in others]),
    ):
        moved, rdma, fallbacks, staged, registrations, python = map(sum, zip(*of, strict=True))
        click.echo(
            f"  {title}: {registrations} registrations, {python} bytes in Python objects, "
            f"{rdma} of {moved} bytes by RDMA, {staged} of them staged, {fallbacks} fallbacks, "
            f"median {statistics.median(took):.3f} s"
        )
