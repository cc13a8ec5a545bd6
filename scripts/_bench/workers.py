"""Processes of their own that do what they are told: a job a line of JSON, its answer another."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import click
import trio
from harness.network import Unavailable

PROGRAM = Path(__file__).resolve().parents[1] / "bench"
_END_TIMEOUT_S = 10.0


class WorkerFailed(Unavailable):
    """It ended; what it said is on standard error."""


class Worker:
    """A process that runs a function, "module:function", with `plan` as its arguments. A context manager.

    `ready` is what the function told before its first job. `launcher` is a command prefix.
    """

    def __init__(
        self,
        name: str,
        function: str,
        plan: Mapping[str, object],
        launcher: tuple[str, ...] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [*launcher, sys.executable, PROGRAM, "worker", function, json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.ready: Any = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            self.ready = self._answer("its start")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def do(self, job: str, *arguments: object, count: int = 1) -> list[float]:
        """Do a job `count` times; what each gave. Raises WorkerFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([job, arguments, count]) + "\n")
        self._process.stdin.flush()
        answers: list[float] = self._answer(f"{job} of {arguments}")
        return answers

    def _answer(self, what: str) -> Any:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            status = self._process.wait()
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with {status}"
            raise WorkerFailed(f"the {self.name} worker ended {how} at {what}")
        return json.loads(answer)


def slowest(workers: Sequence[Worker], job: str, *arguments: object) -> float:
    """Have all workers do a job at once. Return what the slowest gave, in seconds. Raises WorkerFailed."""
    with ThreadPoolExecutor(len(workers)) as pool:
        answers = pool.map(lambda one: one.do(job, *arguments), workers)
        return float(max(seconds for [seconds] in answers))


def tell(answer: object) -> None:
    """Send the worker's answer."""
    print(json.dumps(answer), flush=True)


async def serve_jobs(jobs: object) -> None:
    """Answer line after line until standard input ends; `jobs` has an async method for each."""
    tell(None)
    async for line in trio.wrap_file(sys.stdin):
        name, arguments, count = json.loads(line)
        job = getattr(jobs, name)
        tell([await job(*arguments) for _ in range(count)])


@click.command("worker", hidden=True)
@click.argument("function")
@click.argument("plan")
def worker(function: str, plan: str) -> None:
    """Be a worker."""
    module, _, name = function.partition(":")
    work = partial(getattr(importlib.import_module(module), name), **json.loads(plan))
    if inspect.iscoroutinefunction(work.func):
        trio.run(work)
    else:
        work()
