"""A training loop's traffic: one mount saves version after version of a model, another loads each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .parts import ClusterMount

FILE = "model.npy"


class Counts(NamedTuple):
    """What one mount has counted. `python_bytes`: parameter bytes that a Python object of it held."""

    moved_bytes: int
    rdma_bytes: int
    fallbacks: int
    staged_bytes: int
    registrations: int
    python_bytes: int

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class Version(NamedTuple):
    """What one version cost at the mount that saved it and at the one that loaded it."""

    save_s: float
    load_s: float
    saved: Counts
    loaded: Counts


def counts(mount: ClusterMount) -> Counts:
    status = mount.status()
    cluster = status["cluster"]
    return Counts(
        moved_bytes=cluster["fetched_bytes"] + cluster["published_bytes"],
        rdma_bytes=cluster["rdma_bytes"],
        fallbacks=cluster["rdma_fallbacks"],
        staged_bytes=cluster["rdma_staged_bytes"],
        registrations=cluster["rdma_registrations"],
        python_bytes=cluster["message_bytes"] + status["bytes_carried"],
    )


def train(
    trainer: ClusterMount, worker: ClusterMount, versions: int, size_bytes: int
) -> Iterator[Version]:
    """Raises AssertionError when another version is loaded than was saved last."""
    model = np.arange(size_bytes // 4, dtype=np.float32)
    for version in range(1, versions + 1):
        model[0] = model[-1] = version
        before = counts(trainer), counts(worker)
        began = time.perf_counter()
        np.save(trainer.path / FILE, model)
        saved = time.perf_counter()
        loaded = np.load(worker.path / FILE)
        ended = time.perf_counter()
        assert np.array_equal(loaded, model), f"version {version} is not what was saved"
        yield Version(
            saved - began, ended - saved,
            counts(trainer).since(before[0]), counts(worker).since(before[1]),
        )  # fmt: skip
