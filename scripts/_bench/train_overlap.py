"""A training step whose computation takes as long as its communication, and how much of that is hidden."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness.cluster import MIB, Cluster, Plan
from rich.text import Text

from irdmafs import client
from irdmafs.train import TrainConfig, begin

from .command import SETTINGS, measuring, say, wide_console
from .tables import table
from .train import LEASE_S, reducing, working
from .workers import slowest, tell

WORKERS = 2
LAYERS = 16
WAYS: dict[str, dict[str, bool]] = {
    "one after the other": {},
    "overlap": {"overlap": True},
    "delayed": {"delayed": True},
}


def _layer(torch: Any) -> Any:
    """Return a layer whose backward pass is a sleep."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, hidden: Any, weight: Any, seconds: float) -> Any:
            context.weight, context.seconds = weight, seconds
            return hidden.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> tuple[Any, Any, None]:
            time.sleep(context.seconds)
            return gradient, torch.full_like(context.weight, 0.001), None

    return Layer


def work(directory: str, name: str, options: dict[str, Any]) -> None:
    """A worker: for each line, with the seconds of a backward pass and a number of steps, it makes them and
    tells the seconds that one took."""
    import torch

    from irdmafs.train.torch import ParameterServerOptimizer

    torch.set_num_threads(1)
    layer = _layer(torch)
    shapes = json.loads((Path(directory) / "shapes.json").read_text())
    weights = {key: torch.zeros(shape, requires_grad=True) for key, shape in shapes.items()}
    with ParameterServerOptimizer(
        weights.items(), directory, name=name, timeout_s=120, **options
    ) as optimizer:
        tell(None)
        for line in sys.stdin:
            _, (compute_s, steps), _ = json.loads(line)
            start = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                hidden = torch.zeros(1, requires_grad=True)
                for weight in weights.values():
                    hidden = layer.apply(hidden, weight, compute_s / len(weights))
                hidden.sum().backward()
                optimizer.step()
            tell([(time.perf_counter() - start) / steps])


@click.command(context_settings=SETTINGS)
@click.option(
    "--size", "size_mib", default=16, show_default=True, help="MiB of the model, in fp32."
)
@click.option("--mbit", default=100.0, show_default=True, help="Mbit/s of each link.")
@click.option("--shards", default=32, show_default=True)
@click.option("--steps", default=5, show_default=True, help="Of each measurement.")
def train_overlap(size_mib: int, mbit: float, shards: int, steps: int) -> None:
    """Measure steps whose backward pass takes as long as pushing and pulling do (needs torch).

    Two workers on the hosts of two store nodes train layers whose backward pass is a sleep. First without:
    that is the time for communication. Then with as long a backward pass, in each way that
    irdmafs.train.torch has.
    """
    size = size_mib * MIB
    model = {
        f"layer{number}": np.zeros(size // 4 // LAYERS, np.float32) for number in range(LAYERS)
    }
    shown = table("", "way", "computing, s", "step, s", "step / longer", numbers=True)
    with measuring():
        plan = Plan(
            nodes=WORKERS, mounts=WORKERS, replicas=1, lease_ttl_s=LEASE_S, namespaces=True,
            store_bytes=16 * size, cache_bytes=12 * size,
            beside={number: number for number in range(WORKERS)},
        )  # fmt: skip
        with Cluster(plan) as cluster, contextlib.ExitStack() as stack:
            places = [mount.path / "run" for mount in cluster.mounts]
            places[0].mkdir()
            with client.open(places[0]) as store:
                store.publish_state_dict(model)
            shapes = {key: array.shape for key, array in model.items()}
            (places[0] / "shapes.json").write_text(json.dumps(shapes))
            config = TrainConfig(rule="sgd", workers=WORKERS, whole_every=0)
            begin(places[0], config, shards=shards)
            for mount, place in zip(cluster.mounts, places, strict=True):
                cluster.network.shape(mount.host, mbit * 1e6)
                stack.enter_context(reducing(place))
            moving_s = 0.0
            for way, options in WAYS.items():
                with working(places, "_bench.train_overlap:work", options=options) as workers:
                    slowest(workers, "steps", 0.0, 2)
                    moving_s = moving_s or slowest(workers, "steps", 0.0, steps)
                    step_s = slowest(workers, "steps", moving_s, steps)
                say(f"{way}: {step_s:.3f} s")
                cells = (way, f"{moving_s:.3f}", f"{step_s:.3f}", f"{step_s / moving_s:.2f}")
                shown.add_row(*map(Text, cells))
    wide_console(80).print(shown)
