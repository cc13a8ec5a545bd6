"""Certificates, configuration, log lines and metrics of a cluster's processes."""

import itertools
import json
import logging
import os
import re
import select
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio
from conftest import make_mount
from harness.cluster_mount import CLUSTER
from harness.mountpoint import eventually

from irdmafs.backend.cluster import config as cluster_config
from irdmafs.backend.cluster.config import ClusterConfig
from irdmafs.backend.model.values import ConfigError
from irdmafs.backend.node.daemon import NodeFigures
from irdmafs.backend.observe import logs
from irdmafs.backend.observe.metrics import SCRAPES_AT_ONCE, serve_metrics
from irdmafs.backend.transport.door import ServerFigures
from irdmafs.backend.trust.authority import begin_ca_change, finish_ca_change, issue, make_ca
from irdmafs.backend.trust.security import (
    Credentials,
    CredentialsError,
    Identity,
    describe_tls_error,
    peer_identity,
)
from irdmafs.cli.cluster_admin import Plan, made_files

SECOND = 1 / 86400


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """One that holds a CA."""
    make_ca(str(tmp_path), "test")
    return str(tmp_path)


@pytest.fixture
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    """A node of another cluster."""
    elsewhere = str(tmp_path_factory.mktemp("elsewhere"))
    make_ca(elsewhere, "test")
    return issue(elsewhere, "n1", "node")


Outcome = Identity | str | None


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[Outcome, Outcome]:
    """Whom the server and the client see at the other end, or why they see nobody."""

    def see(context: ssl.SSLContext, end: socket.socket, serves: bool) -> Outcome:
        with end:
            try:
                with context.wrap_socket(end, server_side=serves) as connection:
                    # With TLS 1.3 a client learns here that it was refused.
                    assert serves or connection.recv(1) == b"!"
                    seen = peer_identity(connection)
                    if serves:
                        connection.sendall(b"!")
                    return seen
            except ssl.SSLError as error:
                return describe_tls_error(error)
            except OSError as error:
                return str(error)

    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(see, server, ours, True)
        seen = see(client, theirs, False)
        return serving.result(), seen


def lenient_context(credentials: Credentials | None = None) -> ssl.SSLContext:
    """What a program of somebody else's may use."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if credentials is not None:
        context.load_cert_chain(credentials.cert, credentials.key)
    return context


# -- who gets in ----------------------------------------------------------------------------------


def test_members_know_each_other_by_role_and_name(directory: str) -> None:
    node, mount = issue(directory, "n1", "node"), issue(directory, "w.1", "mount")
    seen = shake_hands(node.server_context(), mount.client_context())
    assert seen == (mount.check(), node.check())
    assert [one[:2] for one in seen if isinstance(one, Identity)] == [
        ("mount", "w.1"),
        ("node", "n1"),
    ]
    seen = shake_hands(node.server_context(), node.client_context())
    assert seen == (node.check(), node.check())


def test_members_of_another_cluster_stay_out(directory: str, stranger: Credentials) -> None:
    node = issue(directory, "n1", "node")
    server, client = shake_hands(node.server_context(), stranger.client_context())
    assert server == "the peer does not know our CA: its credentials are of another cluster"
    assert "not of this cluster's CA" in str(client)
    server, client = shake_hands(node.server_context(), lenient_context(stranger))
    assert "not of this cluster's CA" in str(server)
    assert "does not know our CA" in str(client)


def test_who_has_no_certificate_stays_out(directory: str) -> None:
    node = issue(directory, "n1", "node")
    server, client = shake_hands(node.server_context(), lenient_context())
    assert server == client == "no certificate was shown; set ca, cert and key in [cluster]"


def test_a_mount_cannot_pose_as_a_node(directory: str) -> None:
    node, mount = issue(directory, "n1", "node"), issue(directory, "w1", "mount")
    _, client = shake_hands(mount.server_context(), node.client_context())
    assert "not for this use" in str(client)


def test_tls_before_1_3_is_refused(directory: str) -> None:
    node = issue(directory, "n1", "node")
    old = lenient_context(node)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    server, _ = shake_hands(node.server_context(), old)
    assert server == "unsupported protocol"


def test_an_expired_certificate_stays_out(directory: str) -> None:
    node = issue(directory, "n1", "node")
    old = issue(directory, "w1", "mount", days=-SECOND)
    server, client = shake_hands(node.server_context(), lenient_context(old))
    assert "certificate has expired" in str(server)
    assert client == "the peer says that our certificate has expired"


# What TLS calls close_notify: a peer's last words, if it says any.
@pytest.mark.parametrize("last_words", [b"", b"\x15\x03\x03\x00\x02\x01\x00"])
def test_a_peer_that_breaks_off_may_not_trust_us(directory: str, last_words: bytes) -> None:
    context = issue(directory, "n1", "node").server_context()
    hello = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        lenient_context().wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(hello.read() + last_words)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ssl.SSLError) as caught:
            context.wrap_socket(ours, server_side=True)
    assert "it may not trust our certificate" in describe_tls_error(caught.value)


def test_a_ca_is_replaced_while_certificates_of_both_are_in_use(directory: str) -> None:
    copies = itertools.count()

    def copied(credentials: Credentials) -> Credentials:
        """As on a host that has its ca.pem of now."""
        ca = Path(directory, f"ca-copy{next(copies)}.pem")
        ca.write_bytes(Path(directory, "ca.pem").read_bytes())
        return Credentials(str(ca), credentials.cert, credentials.key)

    def meet(server: Credentials, client: Credentials) -> tuple[Outcome, Outcome]:
        return shake_hands(server.server_context(), client.client_context())

    old_node, old_mount = issue(directory, "n1", "node"), issue(directory, "w1", "mount")
    before = copied(old_mount)
    begin_ca_change(directory, "test")
    with pytest.raises(CredentialsError, match="the change before is not finished"):
        begin_ca_change(directory, "test")
    new_node, new_mount = issue(directory, "n2", "node"), issue(directory, "w2", "mount")
    for node in (copied(old_node), copied(new_node)):
        for mount in (copied(old_mount), copied(new_mount)):
            assert meet(node, mount) == (mount.check(), node.check())
    server, client = meet(copied(new_node), before)
    assert "not of this cluster's CA" in str(client)
    finish_ca_change(directory)
    with pytest.raises(CredentialsError, match="no change has begun"):
        finish_ca_change(directory)
    assert meet(copied(new_node), copied(new_mount)) == (new_mount.check(), new_node.check())
    server, client = meet(copied(new_node), before)
    assert "does not know our CA" in str(server) or "not of this cluster" in str(server)
    with pytest.raises(CredentialsError, match="was not issued by the CA"):
        copied(old_mount).check()
    assert os.stat(os.path.join(directory, "ca.key")).st_mode & 0o777 == 0o600


def test_a_change_of_the_ca_that_was_cut_off_is_begun_again(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, replace = issue(directory, "n1", "node"), os.replace

    def cut_off(source: str, target: str) -> None:
        if target.endswith("ca.key"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        begin_ca_change(directory, "test")
    monkeypatch.undo()
    with pytest.raises(CredentialsError, match="if irdmafs cluster rotate-ca was cut off"):
        finish_ca_change(directory)
    assert node.check().name == "n1"
    begin_ca_change(directory, "test")
    assert Path(node.ca).read_bytes().count(b"BEGIN") == 2
    assert node.check().name == issue(directory, "n1", "mount").check().name
    finish_ca_change(directory)


def test_of_two_commands_at_once_in_a_directory_one_is_refused(tmp_path: Path) -> None:
    plan = Plan("test", ("h:1",), {}, ("h",), tls=True)
    with made_files(str(tmp_path), plan):
        before = set(tmp_path.iterdir())
        with pytest.raises(ConfigError, match="another command"), made_files(str(tmp_path), plan):
            pass
        with pytest.raises(ConfigError, match="another command"):
            begin_ca_change(str(tmp_path), "test")
        assert set(tmp_path.iterdir()) == before


# -- files ----------------------------------------------------------------------------------------


def test_keys_are_for_their_owner_only(directory: str) -> None:
    issue(directory, "n1", "node")
    for name in os.listdir(directory):
        assert os.stat(os.path.join(directory, name)).st_mode & 0o777 == 0o600, name


def test_credentials_that_cannot_work_say_why(directory: str, stranger: Credentials) -> None:
    def why(ca: str, cert: str, key: str) -> str:
        with pytest.raises(CredentialsError) as caught:
            Credentials(ca, cert, key).client_context()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    node = issue(directory, "n1", "node")
    old = issue(directory, "n2", "node", days=-SECOND)
    ca, cert, key = node.ca, node.cert, node.key
    assert why(ca, "/nowhere", key) == "cannot read /nowhere: No such file or directory"
    assert why(ca, cert, "/nowhere") == "cannot read /nowhere: No such file or directory"
    assert why(ca, key, key).startswith(f"{key} holds no usable certificate")
    assert why(ca, cert, old.key).startswith(f"{old.key} is not the key of the certificate {cert}")
    assert why(stranger.ca, cert, key).startswith(f"{cert} was not issued by the CA in")
    assert why(ca, stranger.cert, stranger.key).startswith(f"{stranger.cert} was not issued by")
    assert re.fullmatch(
        rf"the certificate {old.cert} expired on [-\d]+ [\d:]+ UTC; remove it and its key, and make "
        "another with: irdmafs cluster cert n2 --role node",
        why(ca, old.cert, old.key),
    )
    assert "names no role" in why(ca, ca, os.path.join(directory, "ca.key"))
    os.chmod(key, 0o604)
    assert why(ca, cert, key) == f"{key} can be read by others; run: chmod 600 {key}"


def test_a_key_handed_to_a_service_through_a_group_is_fine(directory: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root's keys may be read by a group")
    node = issue(directory, "n1", "node")
    os.chmod(node.key, 0o640)
    assert node.check()[:2] == ("node", "n1")


def test_nothing_is_issued_over_a_file_or_without_ca(directory: str, stranger: Credentials) -> None:
    node = issue(directory, "n1", "node")
    before = Path(node.cert).read_bytes(), Path(node.key).read_bytes()
    with pytest.raises(CredentialsError, match=r"node-n1.key exists"):
        issue(directory, "n1", "node")
    with pytest.raises(CredentialsError, match=r"ca.key exists"):
        make_ca(directory, "test")
    assert (Path(node.cert).read_bytes(), Path(node.key).read_bytes()) == before
    for name in ("", "a b", "../x", "ä", "x" * 65):
        with pytest.raises(CredentialsError, match="is not a name"):
            issue(directory, name, "node")
    with pytest.raises(CredentialsError, match="is no host name"):
        issue(directory, "e", "etcd", ["ä"])
    Path(directory, "ca.key").write_bytes(Path(stranger.key).read_bytes())
    with pytest.raises(CredentialsError, match="is not the key of"):
        issue(directory, "n2", "node")
    assert not Path(directory, "node-n2.key").exists()


def test_the_first_certificate_to_expire_counts(directory: str) -> None:
    assert 9.9 < issue(directory, "n1", "node", days=10).days_left() < 10


# -- configuration --------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ClusterConfig]:
    """load(text, **overrides): the configuration in a file of this text."""
    monkeypatch.delenv(cluster_config.PATH_VARIABLE, raising=False)
    path = tmp_path / "c.toml"

    def load(text: str, **overrides: dict[str, object]) -> ClusterConfig:
        path.write_text(text)
        return ClusterConfig.load(str(path), overrides)

    return load


ETCD = '[cluster]\netcd = ["127.0.0.1:2379"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cluster", "c.toml is not TOML: "),
        ("x = 1", "c.toml: unknown key outside a section 'x'"),
        ("cluster = 1", "c.toml: cluster is a section: write [cluster]"),
        ("[nodes]", "c.toml: unknown section 'nodes'; did you mean 'node'?"),
        ("[node]\nstor = 'x'", "c.toml: unknown key 'stor' in [node]; did you mean 'store'?"),
        ("[node]\nqqq = 1", "c.toml: unknown key 'qqq' in [node]; known are: store, listen"),
        ("[node]\nstreams = '4'", "c.toml: node.streams: '4' is not a whole number"),
        ("[node]\nstreams = 0", "c.toml: node: streams must be from 1 to 64, not 0"),
        ("[node]\nsize = '1Q'", "c.toml: node.size: '1Q' is not a size; write it like 512M"),
        ("[node]\nsize = true", "c.toml: node.size: expected a size, got True"),
        ("[node]\nrereplicate_after = '1y'", "node.rereplicate_after: '1y' is not a duration"),
        ("[node]\nlisten = 'a:b'", "c.toml: node: listen: 'a:b' is not HOST:PORT: 'b' is no port"),
        ("[node]\nweight = 0", "c.toml: node: weight must be more than 0"),
        ("[mount]\nsmall_file = '2M'", "c.toml: mount: small_file must be at most 1M, not 2M"),
        ("[mount]\ntimeout = '0.5'", "c.toml: mount: timeout must be"),
        ("[mount]\ntimeout = '2d'", "c.toml: mount: timeout must be"),
        ("[mount]\ntimeout = 'soon'", "c.toml: mount.timeout: 'soon' is not a duration"),
        ("[mount]\nnames_ahead = -2", "c.toml: mount: names_ahead must be at least -1, not -2"),
        ('[log]\nfile = "a\\u0000"', "c.toml: log.file: a text cannot have a NUL byte"),
        ('[mount]\nfollow = ["a\\u0000"]', "c.toml: mount.follow: a text cannot have a NUL byte"),
        ("[mount]\nfollow = ['a/../b']", "'a/../b' is not a path within the filesystem"),
        (
            "[mount]\nmetrics_port = 70000",
            "c.toml: mount: metrics_port must be from 0 to 65535, not 70000",
        ),
        ("[log]\nformat = 'xml'", "c.toml: log.format: 'xml' is not one of text, json"),
        ("[cluster]\nname = 'a/b'", "c.toml: cluster: name: 'a/b' is not a cluster's name"),
        ("[cluster]\netcd = 'h'", "c.toml: cluster.etcd: 'h' is not a list of texts"),
        ("[cluster]\netcd = ['http://h:1']", "cluster: etcd: write 'h:1' instead of"),
        ("[cluster]\nca = 'x'", "c.toml: cluster: ca, cert and key go together"),
        ("[cluster]\netcd_key = 'x'", "etcd_cert and etcd_key go together"),
        ("[cluster]", "c.toml names no etcd; set etcd = "),
    ],
)
def test_a_bad_configuration_is_one_line_that_names_file_and_key(
    load: Callable[..., ClusterConfig], text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_may_begin_with_a_byte_order_mark(load: Callable[..., ClusterConfig]) -> None:
    assert load("\ufeff" + ETCD).cluster.etcd == ("127.0.0.1:2379",)


def test_flags_override_the_file(load: Callable[..., ClusterConfig]) -> None:
    text = ETCD + "[node]\nstore = 'here'\nsize = '64M'\nzone = 'a'\n"
    config = load(text, node={"size": "1G", "zone": None, "rack": "r"})
    assert config.node.size == 1 << 30
    assert config.node.labels == {"zone": "a", "rack": "r", "host": os.uname().nodename}
    with pytest.raises(ConfigError, match="command line: node: streams must be"):
        load(text, node={"streams": 99})


def test_paths_are_relative_to_the_file_but_flags_to_the_caller(
    load: Callable[..., ClusterConfig], tmp_path: Path
) -> None:
    config = load(ETCD + "[node]\nstore = 'here'\n")
    assert config.node.store == str(tmp_path / "here")
    assert load(ETCD, node={"store": "x"}).node.store == os.path.abspath("x")


def test_the_file_is_found_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_text(ETCD)
    monkeypatch.setenv(cluster_config.PATH_VARIABLE, str(tmp_path / "f"))
    assert ClusterConfig.load().cluster.etcd == ("127.0.0.1:2379",)
    monkeypatch.setenv(cluster_config.PATH_VARIABLE, "/nowhere")
    with pytest.raises(ConfigError, match="cannot read the configuration /nowhere: No such file"):
        ClusterConfig.load()


def test_a_node_without_credentials_listens_on_loopback(load: Callable[..., ClusterConfig]) -> None:
    assert load(ETCD).listen() == ("127.0.0.1", "127.0.0.1", 0)
    assert load(ETCD, node={"listen": "[::1]:70"}).listen() == ("::1", "::1", 70)
    for address in ("0.0.0.0", "0.0.0.0:80", "::", "10.1.2.3"):
        with pytest.raises(ConfigError, match=r"without credentials: .* --insecure"):
            load(ETCD, node={"listen": address}).listen()
    insecure = load(ETCD, node={"listen": "0.0.0.0:80"}, cluster={"insecure": True})
    # Told to peers: the address that reaches etcd.
    assert insecure.listen() == ("0.0.0.0", "127.0.0.1", 80)
    with pytest.raises(ConfigError, match=r"cannot resolve 'no\.such"):
        load(ETCD, node={"listen": "no.such.host.invalid"}).listen()


def test_one_file_serves_every_role(load: Callable[..., ClusterConfig], directory: str) -> None:
    text = ETCD + "ca = 'ca.pem'\ncert = '{role}.pem'\nkey = '{role}.key'\n"
    issue(directory, "node", "node")
    config = load(text).cluster
    credentials = config.credentials("node")
    assert credentials is not None
    assert credentials.check()[:2] == ("node", "node")
    with pytest.raises(ConfigError, match=r"cannot read .*/mount.key"):
        config.credentials("mount")
    config = load(text.replace("{role}", "node")).cluster
    with pytest.raises(ConfigError, match="is the certificate of a node, not of a mount"):
        config.credentials("mount")
    assert load(ETCD).cluster.credentials("node") is None


# -- log lines ------------------------------------------------------------------------------------


def logged(program: str, format: str = "text") -> list[str]:
    """What a process logs that sets up logging and runs this."""
    setup = (
        "import logging\nfrom irdmafs.backend.observe import logs\n"
        f"logs.set_up_logging('node', {format!r})\nlogs.identify('node', '3f')\n"
        "log = logging.getLogger('irdmafs.backend.transport.server')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", setup + program], capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_lines_carry_who_and_for_which_request() -> None:
    program = "with logs.request('ab-7'):\n  log.info('one')\nlog.info('two')"
    one, two = logged(program)
    assert one.endswith(" INFO irdmafs.backend.transport.server [node 3f ab-7]: one")
    assert two.endswith(" INFO irdmafs.backend.transport.server [node 3f]: two")


def test_json_lines_have_the_same_as_fields() -> None:
    program = "with logs.request('ab-7'):\n  log.warning('a\\nb %s', 'c', exc_info=ValueError('x'))"
    [line] = logged(program, "json")
    fields = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", fields.pop("time"))
    assert fields.pop("pid")
    assert fields.pop("exception") == "ValueError: x"
    assert fields == {
        "level": "warning",
        "logger": "irdmafs.backend.transport.server",
        "message": "a\nb c",
        "component": "node",
        "member": "3f",
        "request": "ab-7",
    }


def test_a_peer_cannot_forge_a_line() -> None:
    forged = r"'x\n2026-01-01 1 INFO root: all is well\x1b[2J'"
    program = f"with logs.request({forged}): log.info('bad frame from %s', {forged})"
    [line] = logged(program)
    assert line.count(r"x\x0a2026-01-01") == line.count(r"\x1b[2J") == 2
    [_, *lines] = logged(f"log.info('bad', exc_info=ValueError({forged}))")
    assert [line.strip() for line in lines if not line.startswith("  ")] == []
    assert "\x1b" not in "".join(lines)


def test_lines_that_a_peer_causes_are_limited_and_counted() -> None:
    program = (
        "for _ in range(1000): log.warning('bad frame')\n"
        "for _ in range(1000):\n with logs.log_failure(log.info, 'one'): raise OSError('away')\n"
        "for _ in range(1000):\n with logs.log_failure(log.info, 'two'): raise OSError('away')\n"
        "log.warning('another')\n"
        "logging.getLogger('irdmafs.backend.namespace').warning('mine')"
    )
    lines = logged(program)
    for what in ("bad frame", "one: away", "two: away"):
        assert sum(what in line for line in lines) == logs.REPEATS_MAX
    assert len(lines) == 3 * logs.REPEATS_MAX + 2


def test_the_next_line_says_how_many_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    limit = logs.RepeatLimit()

    def record() -> logging.LogRecord:
        return logging.LogRecord(logs.LIMITED_LOGGERS[0], 30, "f.py", 1, "bad", (), None)

    passed = sum(limit.filter(record()) for _ in range(25))
    assert passed == logs.REPEATS_MAX
    now = logs.REPEAT_WINDOW_S
    late = record()
    assert limit.filter(late)
    assert late.__dict__["dropped"] == 25 - logs.REPEATS_MAX


def test_requests_of_one_process_have_different_ids_and_end() -> None:
    assert logs.current_request() == ""
    with logs.request() as one:
        with logs.request() as two:
            assert logs.current_request() == two != one
        assert logs.current_request() == one
    assert logs.current_request() == ""


# -- metrics --------------------------------------------------------------------------------------


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def test_counters_become_metrics_when_they_are_asked_for() -> None:
    counters = ServerFigures()
    counters.requests["put"] += 3
    counters.sent_bytes += 1 << 40
    refreshed = 0

    def figures() -> list[ServerFigures | NodeFigures]:
        nonlocal refreshed
        trio.lowlevel.current_task()  # raises outside of the event loop
        refreshed += 1
        return [counters, NodeFigures({"primary": 2}, 1.5)]

    async with serve_metrics("node", figures, {"node": "3f"}, "127.0.0.1", 0) as port:
        assert refreshed == 0
        found = await trio.to_thread.run_sync(scrape, port)
    assert found['irdmafs_node_requests_total{kind="put",node="3f"}'] == 3
    assert found['irdmafs_node_sent_bytes_total{node="3f"}'] == 1 << 40
    assert found['irdmafs_node_groups{node="3f",state="primary"}'] == 2
    assert found["process_open_fds"] > 0
    assert refreshed == 1


async def test_idle_connections_do_not_keep_scrapes_out_for_ever() -> None:
    """The oldest connections above the limit are closed at once; others keep their threads."""
    async with serve_metrics("mount", list, {}, "127.0.0.1", 0) as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        while len(closed := select.select(idle, [], [], 0)[0]) < 20 - SCRAPES_AT_ONCE:
            await trio.sleep(0.01)
        await trio.sleep(0.2)
        assert select.select(idle, [], [], 0)[0] == closed
        assert {connection.recv(1) for connection in closed} == {b""}
        with trio.fail_after(5):
            assert await trio.to_thread.run_sync(scrape, port)
        for connection in idle:
            connection.close()


async def test_a_taken_port_is_one_line() -> None:
    async with serve_metrics("mount", list, {}, "127.0.0.1", 0) as port:
        with pytest.raises(ConfigError, match="Address already in use; choose another"):
            async with serve_metrics("mount", list, {}, "127.0.0.1", port):
                pass


@pytest.mark.timeout(90)
def test_a_mount_serves_metrics_of_its_cache_and_its_session() -> None:
    with make_mount(CLUSTER, "--metrics-port", "0") as mount:
        (mount.path / "file").write_bytes(b"x" * 1000)
        (mount.path / "file").read_bytes()
        eventually(lambda: "metrics are served" in mount.log.read_text(), "metrics are served")
        found = re.search(r"metrics are served on \S+ port (\d+)", mount.log.read_text())
        assert found is not None
        scraped = scrape(int(found[1]))
    samples = {name.partition("{")[0]: value for name, value in scraped.items()}
    assert samples["irdmafs_mount_published_bytes_total"] == 1000
    assert samples["irdmafs_mount_session_valid_seconds"] > 0
    assert samples["irdmafs_mount_cache_limit_bytes"] > 0
    assert any('kind="OPEN"' in name for name in scraped)
