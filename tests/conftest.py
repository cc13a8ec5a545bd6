"""Fixtures: a mount for each session, a directory of its own for each test, other processes."""

import functools
import gc
import inspect
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from harness import rdma
from harness.cluster import living as clusters
from harness.cluster_mount import CLUSTER, OneNodeMount
from harness.clusters import LONG_LEASE_S, Apart, Cluster, ClusterMount, Plan
from harness.etcd import LONG_LIVED
from harness.etcd_server import EtcdKeys, EtcdServer, end_shared_etcd, new_prefix, shared_etcd
from harness.forks import end_forking, fork_commands
from harness.guest.kernel import cache_directory, is_at_hand
from harness.guest_tests import GuestTests, starts_guest
from harness.mountpoint import Mount, living
from harness.processes import NOBODY, Process, TakeProcess
from harness.programs import breakable
from harness.roce import find_ways
from harness.scenarios import AsOnTmpfs, outcomes
from harness.scratch import mounted_on, scratch, sweep
from harness.tiers import Tier, running, tier_of
from harness.training_runs import hurry
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from irdmafs.backend.trust.authority import issue, make_ca
from irdmafs.backend.trust.security import Credentials

if TYPE_CHECKING:
    from harness.spread import Spread
    from xdist.remote import Producer

# A module that is to run on a mount of a cluster, too, sets SESSIONS = EVERYWHERE.
SESSIONS = ("kernel", "pyfuse3")
EVERYWHERE = (*SESSIONS, CLUSTER)
# The folders of tests in the order of what builds on what: the first failure is the deepest.
ROOMS = (
    "tests", "project", "namespace", "kv", "store", "fuse", "posix", "client", "cli", "transport", "node",
    "cluster", "coherence", "security", "faults", "verbs",
)  # fmt: skip
PR_SET_DUMPABLE = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=[tier.name.lower() for tier in Tier],
        default=Tier.ALL.name.lower(),
        help="run the tests of a tier and of those below it (tests/harness/tiers.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A daemon that crashes in somebody's C says where, in its log.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # etcd: its idle threads would look for work, on processors that all tests share.
    os.environ.setdefault("GOMAXPROCS", "1")
    sweep()
    fork_commands()
    # The next checkout, too, finds what hypothesis learnt of our modules.
    set_hypothesis_home_dir(cache_directory().with_name("hypothesis"))
    # How long an example takes depends on what else the machine does.
    settings.register_profile("irdmafs", deadline=None, max_examples=50)
    settings.register_profile("many", deadline=None, max_examples=1000)  # --hypothesis-profile=many
    settings.load_profile("irdmafs")
    config.addinivalue_line("markers", "kernel_session(reason): promised by that session only")
    config.addinivalue_line("markers", "guest_tests: asks for the run of tests in a guest")
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and config.args == ["tests"]:
        config.args = _rooms_from_a_place_of(int(worker.removeprefix("gw")))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A run in a shell's background; what it starts would ignore Ctrl-C as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _rooms_from_a_place_of(worker: int) -> list[str]:
    """Return the folders of tests in an order of a worker's own, so that each worker compiles some of them
    and finds the others compiled."""
    modules = Path(__file__).parent.glob("*/test_*.py")
    rooms = sorted({f"tests/{module.parent.name}" for module in modules})
    first = worker * len(rooms) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    return [*rooms[first:], *rooms[:first]]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    highest = Tier[config.getoption("tier").upper()]
    if highest < Tier.ALL and (left_out := [item for item in items if tier_of(item) > highest]):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if tier_of(item) <= highest]
    order = {room: number for number, room in enumerate(ROOMS)}

    def place(item: pytest.Item) -> tuple[int, int, Path]:
        waits = "guest_kernel" in getattr(item, "fixturenames", ())
        last = waits + (item.get_closest_marker("guest_tests") is not None)
        return last, order.get(item.path.parent.name, len(ROOMS)), item.path

    items.sort(key=place)


def pytest_collection_finish() -> None:
    # Tests that collect garbage would look through all modules and tests each time, for 0.1 s.
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "Spread":
    # Only here is pytest-xdist known to be installed.
    from harness.spread import Spread

    return Spread(config, log)


def make_mount(session: str, *arguments: str, store_size: str | None = None) -> Mount:
    """A mount that is not mounted yet. Skips the test where the session cannot run."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse on this machine")
    if os.geteuid() != 0:
        if session in ("kernel", CLUSTER):
            pytest.skip("the kernel session needs CAP_SYS_ADMIN")
        if store_size is not None:
            pytest.skip("mounting a small store needs root")
    if session == CLUSTER:
        return OneNodeMount(arguments, store_size)
    return Mount(session, arguments=arguments, store_size=store_size)


def _skip_what_is_not_promised(item: pytest.Item, session: str) -> None:
    marker = item.get_closest_marker("kernel_session")
    if marker and session not in ("kernel", CLUSTER):
        pytest.skip(f"only in the kernel session: {marker.args[0]}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "session" in metafunc.fixturenames:
        sessions = getattr(metafunc.module, "SESSIONS", SESSIONS)
        metafunc.parametrize("session", sessions, indirect=True, scope="module")


@pytest.fixture(scope="module")
def session(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class SharedMounts:
    """The mounts that tests of a worker share, and another one after a test that made one of them end."""

    def __init__(self) -> None:
        self._made: dict[str, Mount] = {}

    def get(self, session: str) -> Mount:
        mount = self._made.pop(session, None)
        if mount is not None and not (mount.is_mounted() and mount.pids()):
            mount.close()
            mount = None
        if mount is None:
            options = ("-o", "allow_other") if os.geteuid() == 0 else ()
            mount = make_mount(session, *options).__enter__()
        return self._made.setdefault(session, mount)

    def close(self) -> None:
        while self._made:
            self._made.popitem()[1].close()


@pytest.fixture(scope="session")
def shared_mounts() -> Iterator[SharedMounts]:
    shared = SharedMounts()
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def module_mount(session: str, shared_mounts: SharedMounts) -> Iterator[Mount]:
    mount = shared_mounts.get(session)
    yield mount
    for path in mount.path.iterdir():
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def mount(module_mount: Mount, request: pytest.FixtureRequest) -> Mount:
    """A mount shared by the tests that leave it working."""
    _skip_what_is_not_promised(request.node, module_mount.session)
    return module_mount


@pytest.fixture
def folder(mount: Mount, request: pytest.FixtureRequest) -> Path:
    """A directory on the mount that no other test uses."""
    path = mount.path / re.sub(r"\W+", "_", request.node.name)
    path.mkdir()
    return path


@pytest.fixture
def file(folder: Path) -> Path:
    """The path of a file in that directory, which a test makes itself."""
    return folder / "file"


@pytest.fixture(scope="session")
def etcd() -> EtcdServer:
    """The etcd server that all tests of the session share; do not stop it."""
    return shared_etcd()


@pytest.fixture
def keys(etcd: EtcdServer) -> EtcdKeys:
    """Keys on that server that no other test uses."""
    return EtcdKeys(etcd, new_prefix())


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory."""
    with scratch() as path:
        yield path


@pytest.fixture
def small_tmpfs(memory: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB, which nothing may use any more when the test ends."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    path = memory / "small"
    path.mkdir()
    with mounted_on(path, "size=16m"):
        yield path


@pytest.fixture(scope="module")
def certificates() -> Iterator[dict[str, Credentials]]:
    """A certificate of each role, and "foreign", which is another cluster's."""
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
        make_ca(ours, "ours")
        make_ca(theirs, "theirs")
        yield {
            "foreign": issue(theirs, "one", "mount"),
            **{role: issue(ours, "one", role) for role in ("node", "mount", "reader", "admin")},
        }


@pytest.fixture
def certified(certificates: dict[str, Credentials]) -> dict[str, Any]:
    """Options of transport_place.in_cluster: nodes and the mount have certificates."""
    return {"credentials": certificates["node"], "mount": {"credentials": certificates["mount"]}}


@pytest.fixture
def tmpfs(memory: Path) -> Path:
    """A directory that everybody may write to on an ordinary tmpfs."""
    path = memory / "tmpfs"
    path.mkdir()
    path.chmod(0o777)
    return path


@pytest.fixture
def nobody() -> Iterator[Process]:
    """A process of a user who owns nothing, used by one test at a time."""
    one = _idle_nobodies.pop() if _idle_nobodies else _new_nobody()
    yield one
    _keep(one, _idle_nobodies)


def _new_nobody() -> Process:
    one = Process()
    one.do(f"os.setgroups([]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)")
    # Otherwise /proc/self/fd, where `reset` finds what to close, is root's.
    one.do(f"ctypes.CDLL(None).prctl({PR_SET_DUMPABLE}, 1)")
    return one


@pytest.fixture
def as_on_tmpfs(
    folder: Path, tmpfs: Path, process: TakeProcess, request: pytest.FixtureRequest
) -> AsOnTmpfs:
    def take(name: str) -> Process:
        if name in ("root", "nobody") and os.geteuid() != 0:
            pytest.skip("needs root")
        return request.getfixturevalue("nobody") if name == "nobody" else process()

    def compare(scenario: str, begin: str = "") -> None:
        found, expected = (outcomes(scenario, begin, place, take) for place in (folder, tmpfs))
        assert found == expected

    return compare


@pytest.fixture
def new_mount(session: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Mount]]:
    """new_mount(*arguments, store_size=None) makes a mount that one test alone may kill or break."""
    _skip_what_is_not_promised(request.node, session)
    mounts: list[Mount] = []

    def make(*arguments: str, store_size: str | None = None) -> Mount:
        mounts.append(make_mount(session, *arguments, store_size=store_size))
        mounts[-1].mount()
        return mounts[-1]

    yield make
    for made in mounts:
        made.close()


@pytest.fixture
def own_mount(new_mount: Callable[..., Mount]) -> Mount:
    return new_mount()


class SharedCluster:
    """The cluster that tests of a worker share, and another one after a test that made a part of it end."""

    def __init__(self, plan: Plan, program: str = "") -> None:
        self._plan = replace(plan, etcd_arguments=LONG_LIVED)
        self._program = program
        self._made: Cluster | None = None

    def get(self) -> Cluster:
        if self._made is not None:
            while len(self._made.mounts) > self._plan.mounts:
                self._made.remove_mount()
            if not all(part.alive for part in self._made.parts()):
                self.close()
        if self._made is None:
            with running(Tier.ALL):
                made = Cluster(self._plan, node_program=self._program, mount_program=self._program)
                self._made = made.__enter__()
        return self._made

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[SharedCluster]:
    shared = SharedCluster(Plan(lease_ttl_s=LONG_LEASE_S))
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def shared_rdma_cluster() -> Iterator[SharedCluster]:
    listen = {"listen": rdma.need_way().address}
    plan = Plan(nodes=2, namespaces=False, node_config=listen, lease_ttl_s=LONG_LEASE_S)
    shared = SharedCluster(plan, breakable.__file__)
    yield shared
    shared.close()


@pytest.fixture
def rdma_cluster(shared_rdma_cluster: SharedCluster) -> Cluster:
    """Two store nodes and two mounts that move extents by RDMA. Tests leave them as they are, or whole
    again."""
    return shared_rdma_cluster.get()


@pytest.fixture(scope="module")
def cluster(shared_cluster: SharedCluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster of a module that has a PLAN, or three store nodes and two mounts, for tests that leave
    them as they are."""
    plan: Plan | None = getattr(request.module, "PLAN", None)
    if plan is None:
        yield shared_cluster.get()
    else:
        with Cluster(plan) as made:
            yield made


@pytest.fixture(scope="session")
def shared_failing_cluster() -> Iterator[SharedCluster]:
    shared = SharedCluster(Plan(nodes=1, replicas=1))
    yield shared
    shared.close()


@pytest.fixture
def failing(shared_failing_cluster: SharedCluster) -> Iterator[Cluster]:
    """A store node and two mounts, with empty logs, to be cut off, stopped or killed. They work again after
    the test."""
    cluster = shared_failing_cluster.get()
    if not cluster.network.links:
        pytest.skip("links cannot be cut")
    for mount in cluster.mounts:
        mount.log.write_text("")
    yield cluster
    cluster.mend()


@pytest.fixture
def apart(failing: Cluster, request: pytest.FixtureRequest) -> Apart:
    """The first mount of that cluster, and a directory as it and another mount see it."""
    name = re.sub(r"\W+", "_", request.node.name)
    here, there = (mount.path / name for mount in failing.mounts)
    here.mkdir()
    return failing.mounts[0], here, there


@pytest.fixture(scope="module")
def hosts(cluster: Cluster) -> list[ClusterMount]:
    """Two mounts of one cluster."""
    return cluster.mounts[:2]


@pytest.fixture
def pair(hosts: list[ClusterMount], request: pytest.FixtureRequest) -> list[Path]:
    """A directory that no other test uses, as two hosts see it. A module's STRIPE_SIZE is that of its
    files."""
    name = re.sub(r"\W+", "_", f"{request.path.stem}_{request.node.name}")
    (hosts[0].path / name).mkdir()
    if stripe_size := getattr(request.module, "STRIPE_SIZE", None):
        os.setxattr(hosts[0].path / name, "user.irdmafs.stripe_size", stripe_size)
    return [host.path / name for host in hosts]


@pytest.fixture
def here(pair: list[Path]) -> Path:
    """Return the directory of `pair` as the first host sees it."""
    return pair[0]


@pytest.fixture
def there(pair: list[Path]) -> Path:
    """Return the directory of `pair` as the second host sees it."""
    return pair[1]


_idle_processes: list[Process] = []
_idle_nobodies: list[Process] = []


def _keep(one: Process, idle: list[Process]) -> None:
    """Give a process back to those that other tests may use, if it still works."""
    if one.reset():
        idle.append(one)
    else:
        one.close()


@pytest.fixture
def process() -> Iterator[TakeProcess]:
    """Gives other processes, each used by one test at a time: process()."""
    used: list[Process] = []

    def take() -> Process:
        used.append(_idle_processes.pop() if _idle_processes else Process())
        return used[-1]

    yield take
    for one in used:
        _keep(one, _idle_processes)


@pytest.fixture
def reader(process: TakeProcess) -> Process:
    return process()


@pytest.fixture
def writer(process: TakeProcess) -> Process:
    return process()


@pytest.fixture(scope="session", autouse=True)
def _end_idle_processes() -> Iterator[None]:
    yield
    for one in (*_idle_processes, *_idle_nobodies):
        one.close()
    end_shared_etcd()
    end_forking()


@pytest.fixture(scope="session", autouse=True)
def guest_tests(request: pytest.FixtureRequest) -> Iterator[GuestTests]:
    """The run of tests in a guest beside all others (guest_tests.py): begun here, if it is asked for."""
    with GuestTests() as run:
        asked = any(item.get_closest_marker("guest_tests") for item in request.session.items)
        if asked and starts_guest() and is_at_hand() and not find_ways():
            run.start()
        yield run


@pytest.fixture(autouse=True)
def _abort_mounts_that_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """A system call that waits for a daemon cannot be timed out from outside; end its connection."""
    marker = request.node.get_closest_marker("timeout")
    limit_s = marker.args[0] if marker else float(request.config.getini("timeout") or 120)

    def abort() -> None:
        parts = [part for cluster in clusters for part in cluster.parts()]
        names = [*(str(mount.path) for mount in living), *(part.name for part in parts)]
        print(f"aborting {names}: {limit_s * 0.8} s are over")
        for mount in list(living):
            mount.kill9()
        for part in parts:
            part.kill9()

    timer = threading.Timer(limit_s * 0.8, abort)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    with running(tier_of(item)):
        return (yield)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in trio."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    trio.run(functools.partial(pyfuncitem.obj, **arguments))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None] | pytest.TestReport:
    report: pytest.TestReport = yield  # type: ignore[assignment, misc]
    if report.failed:
        for mount in living:
            report.sections.append((f"log of {mount.path}", mount.log_tail()))
        for cluster in clusters:
            report.sections.append(("logs of a cluster", cluster.logs()))
    return report


@pytest.fixture(scope="session")
def training_mount() -> Iterator[Mount]:
    with make_mount("kernel") as mounted:
        yield mounted


@pytest.fixture
def place(training_mount: Mount, tmp_path: Path) -> Path:
    """A directory of a mount for training runs."""
    path = training_mount.path / tmp_path.name
    path.mkdir()
    return path


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have members of trainings in this process look often."""
    hurry(monkeypatch.setattr)


@pytest.fixture
def run(place: Path, looks_often: None) -> Path:
    """The directory of a training run, which is not there yet, for members that look often."""
    return place / "run"
