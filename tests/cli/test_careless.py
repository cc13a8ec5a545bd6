"""What a cluster says to those who make a mistake, and what their mistakes cannot destroy."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
import trio
from harness.cluster_mount import OneNodeMount
from harness.etcd_server import need_etcd, shared_etcd
from harness.mount_namespaces import in_new_mount_namespace
from harness.mountpoint import INTERRUPTED, IRDMAFS, Mount, eventually, irdmafs, one_line, succeeded
from harness.processes import Program, has_ended

from irdmafs.backend.cluster.config import ClusterConfig
from irdmafs.backend.cluster.membership import Members
from irdmafs.backend.kv import Event
from irdmafs.backend.model import records
from irdmafs.backend.model.placement import pool_of
from irdmafs.cli.command import main

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def mounted() -> Iterator[OneNodeMount]:
    with OneNodeMount() as mount:
        yield mount


@pytest.fixture(scope="module")
def shared() -> Iterator[OneNodeMount]:
    """For tests that leave it and its node as they are."""
    with OneNodeMount() as mount:
        yield mount


def kill_node(mount: OneNodeMount) -> str:
    """Kill the store node; its id."""
    config = mount.config
    mount.kill_node()
    found = json.loads(irdmafs("cluster", "status", "--json", "--cluster", config).stdout)
    assert [node["state"] for node in found["nodes"]] == ["down"]
    identity = Path(config).parent / "store" / "node.json"
    return f"{int(json.loads(identity.read_text())['id'], 16):016x}"


@contextlib.contextmanager
def serving(store: Path, config: str | Path, *arguments: str) -> Iterator[None]:
    """Have a store node of a cluster run as long as the block does."""
    succeeded(irdmafs("serve", store, "--cluster", config, *arguments))
    log = (store / "irdmafs.log").read_text()
    pid = int(re.findall(r"^\S+ \S+ (\d+) ", log, re.MULTILINE)[-1])
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: has_ended(pid), "the node ended", 30)


def init(name: str, directory: Path, *arguments: str) -> None:
    """Make a cluster in the etcd that tests share."""
    need_etcd()
    where = ("--etcd", shared_etcd().endpoint, "--name", name, "--out", directory)
    succeeded(irdmafs("cluster", "init", *where, "--buckets", "4", *arguments))


# -- configuration ---------------------------------------------------------------------------------


def test_sizes_and_durations_are_plain_numbers(tmp_path: Path) -> None:
    """What is computed from them goes into records, which know no others."""
    file = tmp_path / "cluster.toml"
    file.write_text('[cluster]\netcd = ["h"]\n[node]\nsize = "64M"\n[mount]\ntimeout = "5s"\n')
    config = ClusterConfig.load(str(file))
    assert type(config.node.size) is int
    assert config.node.size == 64 << 20
    assert type(config.node.rebalance_rate) is int
    assert type(config.mount.timeout) is float
    assert config.mount.timeout == 5


def test_status_is_unavailable_when_its_configuration_cannot_be_read(tmp_path: Path) -> None:
    """1 would say that the cluster works, with fewer replicas."""
    done = irdmafs("cluster", "status", "--cluster", tmp_path / "none.toml")
    assert "none.toml: No such file or directory" in one_line(done, 2)


def test_advice_names_options_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[cluster]\n")
    line = one_line(irdmafs("rebalance", "--cluster", tmp_path / "cluster.toml"))
    for option in re.findall(r"--[a-z-]+", line):
        assert option in irdmafs("rebalance", "--help").stdout
    assert irdmafs("cluster", "init", "--etcd", ",").returncode == 2


# -- making a cluster ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_init_that_is_ended_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    made = tmp_path / "made"
    command = (*IRDMAFS, "cluster", "init", "--etcd", "127.0.0.1:1", "--out", made)
    with Program(*command, stderr=subprocess.PIPE) as init:
        eventually((made / "cluster.toml").exists, "all files are made")
        init.send_signal(number)
        assert init.stderr.read() == ""
    assert init.returncode in (INTERRUPTED if number == signal.SIGINT else [-number])
    assert list(made.iterdir()) == []


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


async def interrupted_among_several_tasks() -> None:
    async with trio.open_nursery():
        interrupted()


@pytest.mark.parametrize("during", ["flags", "wait"])
def test_ctrl_c_ends_every_command_alike_and_silently(
    during: str, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = click.Command("wait", callback=lambda: trio.run(interrupted_among_several_tasks))
    flag = click.Option(["--flag"], callback=interrupted if during == "flags" else None)
    with pytest.raises(SystemExit) as ended:
        type(main)(commands=[waiting], params=[flag], callback=lambda flag: None).main(["wait"])
    assert ended.value.code == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


# -- directories ----------------------------------------------------------------------------------


def test_a_store_is_not_used_for_another_purpose(mounted: OneNodeMount, tmp_path: Path) -> None:
    """Each kind of daemon empties what it does not know."""
    config = mounted.config
    (mounted.path / "kept").write_bytes(b"kept")
    node_store = Path(config).parent / "store"
    kill_node(mounted)
    kept = sorted(node_store.rglob("*"))
    assert node_store / "extents" in (path.parent for path in kept)
    (tmp_path / "m").mkdir()
    for arguments in ((), ("--cluster", config)):
        line = one_line(irdmafs("mount", tmp_path / "m", "--store", node_store, *arguments))
        assert f"{node_store} is in use as the store of a store node" in line
    assert sorted(node_store.rglob("*")) == kept

    with Mount("kernel") as embedded:
        embedded.unmount()
        for command in (
            ("mount", tmp_path / "m", "--store", embedded.store),
            ("serve", embedded.store),
        ):
            line = one_line(irdmafs(*command, "--cluster", config))
            assert "is in use as the store of a mount without --cluster" in line

    mounted.unmount()
    assert list(mounted.store.glob("extents/*")) == []
    line = one_line(irdmafs("mount", mounted.path, "--store", mounted.store))
    assert f"is the cache of a cluster's mount; mount it with --cluster {config}" in line
    assert "take another directory" in one_line(
        irdmafs("serve", mounted.store, "--cluster", config)
    )


def test_cache_that_does_not_fit_is_refused(shared: OneNodeMount, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    sizes = ("--size", "32M", "--cache-size", "64M")
    line = one_line(irdmafs("mount", tmp_path / "m", "--cluster", shared.config, *sizes))
    assert "a cache of 64.0 MiB does not fit" in line
    assert line.endswith("which has 32.0 MiB: give a smaller --cache-size, or a larger --size")
    # Nothing of the attempt is left.
    assert irdmafs("mount", tmp_path / "m").returncode == 0
    assert irdmafs("umount", "--discard", tmp_path / "m").returncode == 0


def test_files_are_read_whatever_room_their_writers_leave(shared: OneNodeMount) -> None:
    """Working copies fill the cache's directory without asking."""
    first, second = bytes(24 << 20), bytes([1]) * (24 << 20)
    (shared.path / "first").write_bytes(first)
    (shared.path / "second").write_bytes(second)
    with OneNodeMount(store_size="64M") as small:
        small.arguments = shared.arguments
        small.restart()
        with (small.path / "new").open("wb") as new:
            new.write(bytes(36 << 20))
            assert (small.path / "first").read_bytes() == first
            assert (small.path / "second").read_bytes() == second


# -- mounts of a cluster that is not well ----------------------------------------------------------


def test_a_log_in_the_mount_itself_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = one_line(irdmafs("mount", tmp_path, "--log-file", log))
    assert f"the log {log} is below the mountpoint" in line
    assert not log.exists()


def test_mount_without_store_nodes_says_so_and_what_is_lost(mounted: OneNodeMount) -> None:
    config = mounted.config
    (mounted.path / "kept").write_bytes(b"0123456789")
    assert mounted.status()["warnings"] == []
    node = kill_node(mounted)
    found = json.loads(irdmafs("status", "--json", mounted.path).stdout)
    assert any("no store node is up" in warning for warning in found["warnings"])
    assert "warning: no store node is up" in irdmafs("status", mounted.path).stdout

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return irdmafs("cluster", *arguments, "--cluster", config)

    problems = json.loads(run("status", "--json").stdout)["problems"]
    alone = f"node {node} is down, and with it the only copy of 8 groups; start it again"
    assert alone in problems
    line = one_line(run("remove", node))
    assert f"8 groups with 1 file (10 B) have their only copy on node {node}" in line
    done = run("remove", node, "--force")
    assert done.returncode == 1, done
    assert "nothing was changed; --yes agrees" in done.stderr
    assert "  /kept\n" in done.stderr
    keyboard, terminal = pty.openpty()
    command = (*IRDMAFS, "cluster", "remove", node, "--force")
    with open(keyboard, "wb", 0) as typed, open(terminal, "rb", 0) as stdin:
        typed.write(b"n\n")
        done = subprocess.run(
            [*command, "--cluster", config], stdin=stdin, capture_output=True, text=True
        )
    assert done.returncode == 1, done
    assert "Remove them for ever? [y/N]" in done.stderr
    assert done.stderr.endswith("irdmafs: nothing was changed\n")
    assert json.loads(run("status", "--json").stdout)["problems"] == problems
    assert os.listdir(mounted.path) == ["kept"]


@pytest.mark.parametrize("served", ["before", "after"])
def test_a_cluster_goes_on_without_what_only_a_lost_node_had(
    mounted: OneNodeMount, tmp_path: Path, served: str
) -> None:
    """Whether the node that replaces it is there already or not."""
    config = mounted.config
    (mounted.path / "directory").mkdir()
    (mounted.path / "directory" / "lost").write_bytes(b"0123456789")
    os.link(mounted.path / "directory" / "lost", mounted.path / "second name")
    (mounted.path / "empty").touch()
    node = kill_node(mounted)
    shutil.rmtree(Path(config).parent / "store")

    def remove() -> subprocess.CompletedProcess[str]:
        return irdmafs("cluster", "remove", node, "--force", "--yes", "--cluster", config)

    with contextlib.ExitStack() as stack:
        if served == "before":
            stack.enter_context(serving(tmp_path / "store", config))
        done = succeeded(remove())
        assert f"1 file (10 B) have their only copy on node {node}" in done.stderr
        assert "  /directory/lost\n  /second name\n" in done.stderr
        assert "1 file (10 B) are removed" in done.stdout
        if served == "after":
            assert "8 groups wait for a store node: irdmafs serve STORE" in done.stderr
            assert remove().returncode == 0  # it may be repeated
            stack.enter_context(serving(tmp_path / "store", config))
        (mounted.path / "new").write_bytes(b"abc")
        assert (mounted.path / "new").read_bytes() == b"abc"
        assert sorted(os.listdir(mounted.path)) == ["directory", "empty", "new"]
        assert os.listdir(mounted.path / "directory") == []
        (mounted.path / "directory" / "lost").write_bytes(b"again")

        def is_well() -> bool:
            found = irdmafs("cluster", "status", "--json", "--cluster", config)
            return bool(json.loads(found.stdout)["health"] == "ok")

        eventually(is_well, "all groups are begun anew", 30)
        assert "there is no store node" in one_line(remove())


def keeps(store: Path, content: bytes) -> bool:
    """Whether a store node's directory has an extent with this content."""
    for extent in (store / "extents").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if extent.read_bytes().startswith(content):
                return True
    return False


def test_a_node_that_was_given_up_and_comes_back_has_nothing_to_say(
    mounted: OneNodeMount, tmp_path: Path
) -> None:
    config = mounted.config
    store = Path(config).parent / "store"
    (mounted.path / "lost").write_bytes(b"0123456789")
    node = kill_node(mounted)
    serve = ("serve", store, "--cluster", config, "--size", "1G")
    with serving(tmp_path / "store", config):
        succeeded(irdmafs("cluster", "remove", node, "--force", "--yes", "--cluster", config))
        (mounted.path / "new").write_bytes(b"abc")
        assert f"node {node} was removed from the cluster" in one_line(irdmafs(*serve))
        assert irdmafs("cluster", "admit", node, "--cluster", config).returncode == 0
        with serving(store, config):
            # What is new may be moved there meanwhile.
            eventually(lambda: not keeps(store, b"0123456789"), "what was given up is freed", 30)
            (mounted.path / "more").write_bytes(b"def")
            mounted.restart()
            assert (mounted.path / "new").read_bytes() == b"abc"
            assert (mounted.path / "more").read_bytes() == b"def"
            assert not (mounted.path / "lost").exists()


def test_a_publish_that_waits_says_so_once() -> None:
    with OneNodeMount(("--timeout", "1s", "--log-level", "info")) as mount:
        (mount.path / "first").write_bytes(b"has the placement groups made")
        kill_node(mount)
        with pytest.raises(TimeoutError), (mount.path / "file").open("wb", 0) as file:
            file.write(b"abc")
            os.fsync(file.fileno())
        said = [line for line in mount.log_tail(100_000).splitlines() if ".writer" in line]
        # For the fsync, and for the close.
        assert 1 <= len(said) <= 2, said
        assert "cannot be reached" in said[0]


def test_what_no_node_has_is_looked_for_once(mounted: OneNodeMount) -> None:
    """Whether it would come in a message or in a stream."""
    sizes = (10, 300_000)
    for size in sizes:
        (mounted.path / f"lost{size}").write_bytes(bytes(size))
    for extent in (Path(mounted.config).parent / "store" / "extents").iterdir():
        extent.unlink()
    mounted.unmount()
    mounted.arguments = (*mounted.arguments, "--timeout", "1s", "--log-level", "debug")
    mounted.mount()
    for size in sizes:
        with pytest.raises(OSError, match="Input/output error"):
            (mounted.path / f"lost{size}").read_bytes()
    lines = mounted.log_tail(1_000_000).splitlines()
    told = [line for line in lines if "it is lost" in line]
    for line, size in zip(told, sizes, strict=True):
        assert f"/lost{size}: " in line


def test_what_a_close_failed_to_publish_is_not_published_later() -> None:
    """Its writer was told so, and others may have written since."""
    with OneNodeMount(("--timeout", "1s")) as mount:
        (mount.path / "old").write_bytes(b"first")
        kill_node(mount)
        for name in ("old", "new"):
            with pytest.raises(TimeoutError):
                (mount.path / name).write_bytes(b"second")
            told = f"/{name}: what pid {os.getpid()} wrote could not be published: "
            assert told in mount.log_tail(100_000)
        mount.start_node()
        (mount.path / "other").write_bytes(b"other")
        mount.restart()
        # A name without a version is not seen by another mount, nor by a later one.
        assert sorted(os.listdir(mount.path)) == ["old", "other"]
        assert (mount.path / "old").read_bytes() == b"first"
        (mount.path / "new").write_bytes(b"third")
        assert (mount.path / "new").read_bytes() == b"third"


def test_a_placement_that_no_node_fits_is_named() -> None:
    members = Members()
    node = records.NodeAddress("h", 1, 1, ["tcp"], "h", "/s", 1, 1, "0")
    known: list[tuple[bytes, msgspec.Struct]] = [
        (records.SETTINGS_KEY, records.Settings(1, "id", 2, 4, 0, 5)),
        (records.key_of(b"N", 7), records.NodeRecord("up", 1.0, {"zone": "a", "rack": "r"})),
        (records.key_of(b"n", 7), node),
    ]
    rules = (records.policy_key(3), b"zone=b|c"), (records.policy_key(4), b"zone=a")
    values = [*((key, records.encode(record)) for key, record in known), *rules]
    members.apply(1, [Event(1, key, value) for key, value in values])
    place = members.placement().target
    with pytest.raises(OSError, match=r"'zone=b\|c': it wants zone=b\|c, and they have zone a"):
        place(pool_of(2, 3) << records.GROUP_BUCKET_BITS)
    assert place(pool_of(2, 4) << records.GROUP_BUCKET_BITS) == (7,)


@pytest.mark.parametrize("whose", ["another cluster's", "nobody's"])
def test_mount_with_wrong_credentials_is_told_and_does_not_wait(tmp_path: Path, whose: str) -> None:
    ours, theirs, store, path = (tmp_path / name for name in ("ours", "theirs", "store", "m"))
    path.mkdir()
    name = "wrong-" + re.sub(r"\W+", "-", whose)
    init(name, ours, "--etcd-plain")
    init("other-" + name, theirs, "--etcd-plain")
    cluster = (theirs / "cluster.toml").read_text().replace("other-" + name, name)
    if whose == "nobody's":
        cluster = re.sub(r"(?m)^(ca|cert|key) = .*$", "", cluster)
    (theirs / "cluster.toml").write_text(cluster)
    with serving(store, ours / "cluster.toml"), contextlib.ExitStack() as stack:
        stack.callback(irdmafs, "umount", "--discard", path)
        # Longer than a test may take.
        long = ("--cluster", theirs / "cluster.toml", "--timeout", "1h")
        done = succeeded(
            irdmafs("mount", path, "--cluster", ours / "cluster.toml", "--host", "far")
        )
        assert "warning" not in done.stdout
        (path / "kept").write_bytes(b"abc")
        assert irdmafs("umount", "--discard", path).returncode == 0
        done = succeeded(irdmafs("mount", path, *long, "--host", "far"))
        [warning] = [line for line in done.stdout.splitlines() if "warning" in line]
        with pytest.raises(PermissionError):
            (path / "file").write_bytes(b"abc")
        with pytest.raises(PermissionError):
            (path / "kept").read_bytes()
        [told] = json.loads(irdmafs("status", "--json", path).stdout)["warnings"]
        assert told in warning
        reason, log = "speaks no TLS", (store / "irdmafs.log").read_text()
        if whose == "another cluster's":
            reason = "not of this cluster's CA"
            assert f"we trust {theirs}/ca.pem" in told
            assert f"we show {ours}/node.pem and trust {ours}/ca.pem" in log
            assert "speaks no TLS" not in log
        assert reason in told
        assert "of no use" in told


@pytest.mark.parametrize(("flags", "debugs"), [([], True), (["--log-level", "info"], False)])
def test_a_mount_logs_as_its_cluster_s_file_says(
    shared: OneNodeMount, tmp_path: Path, flags: list[str], debugs: bool
) -> None:
    path, config = tmp_path / "m", tmp_path / "cluster.toml"
    path.mkdir()
    base = shared.config.read_text()
    config.write_text(f'{base}\n[log]\nfile = "mount.log"\nlevel = "debug"\n')
    succeeded(irdmafs("mount", path, "--cluster", config, *flags))
    assert irdmafs("umount", "--discard", path).returncode == 0
    assert (" DEBUG " in (tmp_path / "mount.log").read_text()) is debugs


def test_stale_mount_is_healed_as_what_it_was(shared: OneNodeMount, tmp_path: Path) -> None:
    config, path = shared.config, tmp_path / "m"
    path.mkdir()
    succeeded(irdmafs("mount", path, "--cluster", config))
    try:
        pid = json.loads(irdmafs("status", "--json", path).stdout)["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: has_ended(pid), "the daemon is gone")
        advice = f"Heal it with: irdmafs mount {path} --cluster {config}"
        assert advice in irdmafs("status", path).stdout
        assert f"mount it with --cluster {config}" in one_line(irdmafs("mount", path))
        assert irdmafs("mount", path, "--cluster", config).returncode == 0
    finally:
        irdmafs("umount", "--discard", path)


def test_umount_names_a_namespace_that_has_the_mount_still(mounted: OneNodeMount) -> None:
    pid = mounted.status()["pid"]
    command = in_new_mount_namespace("sh", "-c", "echo; exec sleep 99", keep=mounted.path)
    with Program(*command) as other:
        other.stdout.readline()
        line = one_line(irdmafs("umount", mounted.path))
        assert f"process {other.pid} is in it" in line
        assert line.endswith(f"kill {pid}")
        other.kill()
    eventually(lambda: has_ended(pid), "the daemon ended", 30)


def test_documented_options_exist() -> None:
    """Every option of the README is one of a command."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    known = set(re.findall(r"--[a-z][a-z-]+", "".join(_options(main))))
    for line in blocks.splitlines() + re.findall(r"^\| `(irdmafs .*?)` \|", text, re.MULTILINE):
        if line.lstrip().startswith("irdmafs"):
            assert set(re.findall(r"--[a-z][a-z-]+", line.partition("#")[0])) <= known, line


def _options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield " ".join((*parameter.opts, *parameter.secondary_opts, ""))
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _options(inner)
