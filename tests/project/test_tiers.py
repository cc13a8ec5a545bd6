"""A test's tier is found in its code, and a test that starts more than its tier has room for fails."""

from collections.abc import Callable, Iterator

import pytest
from harness import forks
from harness.cluster_mount import OneNodeMount
from harness.clusters import Cluster, Plan
from harness.etcd_server import EtcdServer
from harness.mountpoint import Mount, irdmafs
from harness.processes import Process
from harness.tiers import Tier, allow, running, tier_of


def _own_cluster() -> Cluster:
    return Cluster(Plan())


class _Own:
    def start(self) -> Iterator[EtcdServer]:
        def deep() -> EtcdServer:
            return EtcdServer()

        yield deep()


class _Derived(_Own):
    pass


def starts_nothing(mount: Mount | None = None) -> None:
    assert mount is None


def mounts() -> None:
    Mount("kernel").mount()


def runs_a_command() -> None:
    irdmafs("--version")


def forks_a_command() -> None:
    forks.run([*forks.PREFIX, "--version"], timeout_s=1)


def starts_a_process() -> None:
    Process().close()


def starts_a_cluster() -> None:
    _own_cluster().close()


def mounts_a_cluster() -> None:
    OneNodeMount().mount()


def starts_etcd() -> None:
    for server in _Derived().start():
        server.start()


TIERS: dict[Callable[[], None], Tier] = {
    starts_nothing: Tier.UNITS,
    mounts: Tier.PROMISES,
    runs_a_command: Tier.PROMISES,
    forks_a_command: Tier.PROMISES,
    starts_a_process: Tier.PROMISES,
    starts_a_cluster: Tier.ALL,
    mounts_a_cluster: Tier.ALL,
    starts_etcd: Tier.ALL,
}


@pytest.mark.parametrize("code", TIERS, ids=lambda code: str(code.__name__))
def test_tier_is_found_in_what_a_test_names(
    request: pytest.FixtureRequest, code: Callable[[], None]
) -> None:
    item = pytest.Function.from_parent(request.node.parent, name="test", callobj=code)
    assert tier_of(item) == TIERS[code]


@pytest.mark.parametrize("what", [mounts, starts_etcd, starts_a_cluster])
def test_who_starts_more_than_its_tier_has_fails(what: Callable[[], None]) -> None:
    with running(Tier.UNITS), pytest.raises(AssertionError, match="by a test of the tier UNITS"):
        what()


def test_what_tests_share_is_started_for_all_of_them() -> None:
    with running(Tier.PROMISES):
        with running(Tier.ALL):
            allow(Tier.ALL, "a cluster")
        with pytest.raises(AssertionError):
            allow(Tier.ALL, "a cluster")
