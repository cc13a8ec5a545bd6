"""Training from torch: optimizers whose updates are made in a training directory.

>>> from irdmafs.train.torch import ParameterServerOptimizer
>>> optimizer = ParameterServerOptimizer(model.named_parameters(), "/mnt/params/run1", name="worker0")
>>> for inputs, targets in batches:
...     optimizer.zero_grad()
...     loss(model(inputs), targets).backward()
...     optimizer.step(weight=len(inputs))

The rule, its options and who waits for whom are those of the directory (docs/training.md).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ..client._files import Closing
from .errors import TrainError
from .open_push import OpenPush
from .worker import Worker

__all__ = ["DiLoCo", "ParameterServerOptimizer"]

# A large gradient is summed in rows of so many bytes, a prime number of words: rows of a gradient are no
# multiples of that. Measured: 4 GB/s with two processors, 0.2 GB/s with elements of 8 bytes.
_ROW_BYTES = 8 * 4099


class _Member(Closing):
    """A worker whose newest version is in a model's parameters, as a context manager."""

    _timeout_s: float | None

    @contextlib.contextmanager
    def _joined(self, worker: Worker, tensors: Mapping[str, Any]) -> Iterator[None]:
        """Take part, and get the values; no longer if the block raises. Raises TrainError and OSError."""
        self._worker, self._tensors = worker, tensors
        try:
            _check_shapes(worker, tensors)
            worker.pull_since(0, out=tensors)
            yield
        except BaseException:
            worker.close()
            raise

    @property
    def worker(self) -> Worker:
        """Return the worker that this optimizer is."""
        return self._worker

    def close(self) -> None:
        """Take part no longer. Steps since the last push are lost to the others."""
        self._worker.close()

    def _pull(self) -> None:
        self._worker.pull(out=self._tensors, timeout_s=self._timeout_s)


class ParameterServerOptimizer(_Member, torch.optim.Optimizer):
    """An optimizer whose step pushes the gradients and pulls the next version into the parameters.

    It is a worker until it is closed. Its `param_groups[0]["lr"]`, which a learning
    rate scheduler changes, is pushed with the gradients; that of the first worker by name counts.
    Parameters without a gradient are left out of a push. Parameters on a device are copied through the
    host's memory.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Any]],
        directory: str | os.PathLike[str],
        *,
        name: str | None = None,
        weight: float = 1.0,
        timeout_s: float | None = None,
        overlap: bool = False,
    ) -> None:
        """`params`: `model.named_parameters()`, which get the values of the newest version. `name`: of the
        worker. `weight`: of a push, unless step() says another. `timeout_s`: of the wait for the next
        version.

        `overlap`: write the gradients of a shard as soon as backward() has made all of them, while it goes
        on with others. It needs a directory with several shards to be of use. Gradients that are changed
        after backward(), or accumulated by several, are written again by step().

        Raises TrainError, also if a parameter is not one of the directory's, ValueError and OSError.
        """
        named = list(params)
        if not all(isinstance(one, tuple) for one in named):
            raise ValueError("parameters need names: give model.named_parameters()")
        tensors = dict(named)
        self._weight, self._timeout_s = weight, timeout_s
        with self._joined(Worker(directory, name), tensors):
            super().__init__(list(tensors.values()), {"lr": self._worker.config.learning_rate})
            self._early = _EarlyPush(self._worker, tensors) if overlap else None

    def close(self) -> None:
        """Take part no longer."""
        if self._early is not None:
            self._early.close()
        super().close()

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> Any:
        """Push the gradients, and wait for the parameters to go on with. Return what `closure` returned.

        `weight`: that of this push, such as the number of samples: the mean of all workers' gradients is
        weighted by it. Raises Refused, TimeoutError and OSError. If no version came in time, the push
        counts all the same; `worker.pull()` goes on waiting.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {name: one.grad for name, one in self._tensors.items() if one.grad is not None}
        weight = self._weight if weight is None else weight
        lr = float(self.param_groups[0]["lr"])
        if self._early is not None:
            self._early.finish(gradients, weight, lr)
        else:
            self._worker.push(gradients, weight=weight, lr=lr)
        self._pull()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero; what was written of them is dropped."""
        if self._early is not None:
            self._early.abort()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the only group that there is. Raises ValueError for another: a push has one learning rate."""
        if self.param_groups:
            raise ValueError("the parameters of a training directory are one group")
        super().add_param_group(param_group)


class _EarlyPush:
    """Puts gradients into a push as backward() makes them."""

    def __init__(self, worker: Worker, tensors: Mapping[str, Any]) -> None:
        self._worker = worker
        self._push: OpenPush | None = None
        # By parameter: the digest of the gradient that was put.
        self._put: dict[str, Any] = {}
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._made, name))
            for name, tensor in tensors.items()
            if tensor.requires_grad
        ]

    def _made(self, name: str, tensor: Any) -> None:
        self._put_now(name, tensor.grad)

    def _put_now(self, name: str, gradient: Any) -> None:
        if self._push is None:
            self._push = self._worker.begin_push()
        self._push.put(name, gradient)
        self._put[name] = _digest(gradient)

    def finish(self, gradients: Mapping[str, Any], weight: float, lr: float) -> None:
        """Push these gradients; those that were put already need not be written any more."""
        if self._put.keys() - gradients.keys():
            self.abort()
        for name, gradient in gradients.items():
            if name not in self._put or not torch.equal(self._put[name], _digest(gradient)):
                self._put_now(name, gradient)
        push = self._push or self._worker.begin_push()
        self._push = None
        self._put.clear()
        push.finish(weight, lr=lr)

    def abort(self) -> None:
        if self._push is not None:
            self._push.abort()
        self._push = None
        self._put.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.abort()


class DiLoCo(_Member):
    """Many steps of an optimizer of one's own, then one of the training directory (Douillard et al. 2023,
    arXiv:2311.08105): every H steps the change of the parameters is pushed, and the next version pulled.
    The directory has the rule diloco, and sync local:H.

    A worker until it is closed. A learning rate scheduler is one of the inner optimizer.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        directory: str | os.PathLike[str],
        *,
        name: str | None = None,
        weight: float = 1.0,
        timeout_s: float | None = None,
    ) -> None:
        """`inner`: an optimizer made of `model.named_parameters()`, which get the values of the newest
        version. `name`: of the worker; `weight`: of its pushes.

        Raises TrainError, also for a directory without sync local:H, ValueError and OSError.
        """
        tensors = _parameters_of(inner)
        self.inner, self._weight, self._timeout_s = inner, weight, timeout_s
        with self._joined(Worker(directory, name), tensors):
            kind, self.every = self._worker.config.synchronization
            if kind != "local":
                raise TrainError(f"{self._worker.train.config_path} has no sync local:H")
            self._steps = 0
            self._base = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return those of the inner optimizer."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of the inner optimizer, and after H of them synchronize. Return what `closure`
        returned. Raises as synchronize() does."""
        loss = self.inner.step(closure)
        self._steps += 1
        if self._steps >= self.every:
            self.synchronize()
        return loss

    def synchronize(self) -> None:
        """Push what the steps since the last time have changed, and pull the next version. Raises Refused,
        TimeoutError and OSError."""
        with torch.no_grad():
            deltas = {name: self._base[name] - tensor for name, tensor in self._tensors.items()}
        self._worker.push(deltas, weight=self._weight)
        self._steps = 0
        self._pull()
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                self._base[name].copy_(tensor)


def _parameters_of(inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the parameters of an optimizer by name."""
    named: dict[str, Any] = {}
    for group in inner.param_groups:
        if "param_names" not in group:
            raise ValueError(
                "the optimizer does not know the names of its parameters: make it of "
                "model.named_parameters()"
            )
        named |= zip(group["param_names"], group["params"], strict=True)
    return named


def _digest(gradient: Any) -> Any:
    """Return sums of the bits of a gradient. They tell what its version does not: GradScaler.unscale_, and
    changes of `.data` or of numpy's view, leave that as it was."""
    raw = gradient.detach().reshape(-1).view(torch.uint8)
    whole = len(raw) // _ROW_BYTES * _ROW_BYTES
    if not whole:
        return raw.clone()
    words = raw[:whole].clone() if raw.storage_offset() % 8 else raw[:whole]
    # In sums of 64 bits the signs of two elements of 8 bytes would cancel each other.
    kind = torch.int32 if gradient.element_size() == 8 else torch.int64
    sums = words.view(kind).view(-1, _ROW_BYTES // kind.itemsize).sum(0)
    return torch.cat((sums.view(torch.uint8), raw[whole:]))


def _check_shapes(worker: Worker, tensors: Mapping[str, Any]) -> None:
    shapes = worker.layout.shapes
    for name, tensor in tensors.items():
        if name not in shapes:
            raise TrainError(f"{worker.train.models} has no parameter {name!r}")
        if tuple(tensor.shape) != shapes[name]:
            raise TrainError(
                f"{name!r} has the shape {list(tensor.shape)}, "
                f"and {list(shapes[name])} in {worker.train.models}"
            )
