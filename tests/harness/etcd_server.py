"""Real etcd for tests: one member or a cluster on this machine, its data in memory.

    with EtcdServer() as server:
        server.endpoints  # ["127.0.0.1:12345"]

A test that only needs a place of its own takes the fixture `keys`: a prefix of its own on the server
that all tests of the session share.
"""

import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from harness.closing import Closing
from harness.etcd import LONG_LIVED, Etcd, free_port, missing_programs
from harness.network import Host
from harness.scratch import scratch_directory, sweep
from harness.tiers import Tier, running

__all__ = ["EtcdServer", "end_shared_etcd", "free_port"]

_PASSWORD = "a secret"


def need_etcd() -> None:
    """Skip the test where no etcd can run."""
    if missing := missing_programs():
        pytest.skip(missing)


class EtcdServer(Etcd, Closing):
    """`members` etcd processes that are one cluster. A context manager.

    credentials: clients must show a certificate; a directory that has the files of
        `irdmafs cluster init --prepare`.
    auth: they ask for a password.
    """

    def __init__(
        self,
        members: int = 1,
        *,
        credentials: Path | None = None,
        auth: bool = False,
        arguments: tuple[str, ...] = (),
    ) -> None:
        need_etcd()
        sweep()
        directory = scratch_directory()
        self._auth = auth
        super().__init__(
            [Host(f"m{number}", "127.0.0.1") for number in range(members)],
            directory,
            credentials,
            ("--bcrypt-cost=4", *arguments),
        )

    def __enter__(self) -> Self:
        try:
            self.start()
            if self._auth:
                self._enable_auth()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        self.kill9()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _enable_auth(self) -> None:
        self.ctl("user", "add", f"root:{_PASSWORD}")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("auth", "enable")
        self.user = f"root:{_PASSWORD}"


_shared: list[EtcdServer] = []
_prefixes = itertools.count(1)


def shared_etcd() -> EtcdServer:
    """The etcd server that all tests of the session share; do not stop it."""
    if not _shared:
        with running(Tier.ALL):
            _shared.append(EtcdServer(arguments=LONG_LIVED).__enter__())
    return _shared[0]


def end_shared_etcd() -> None:
    while _shared:
        _shared.pop().close()


@dataclass(frozen=True)
class EtcdKeys:
    """The keys with a prefix, on an etcd server."""

    server: EtcdServer
    prefix: bytes

    @property
    def endpoints(self) -> list[str]:
        return self.server.endpoints


def new_prefix() -> bytes:
    """A key prefix that no other test uses."""
    return b"/test-%d-%d/" % (os.getpid(), next(_prefixes))
