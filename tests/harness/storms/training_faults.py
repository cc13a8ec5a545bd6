"""A training run on a cluster, and faults for both: processes are killed, stopped, and started again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from typing import Any

from harness.closing import Closing
from harness.clusters import Cluster, ClusterMount, CommandFailed, Daemon
from harness.daemons import wait_until
from harness.network import run
from harness.parts import irdmafs_command
from harness.programs import training_worker
from harness.programs.training_worker import Records
from harness.storms.faults import Faults

RUN = "run"
ROUND = (
    *["kill worker"] * 3, *["kill reducer"] * 3, *["kill mount"] * 2, *["kill node"] * 2, "kill etcd",
    "kill all etcd", "pause node", "pause mount",
)  # fmt: skip
KINDS_OF_NAMES = {"w": "worker", "r": "reducer"}
AT_ONCE = 3
BURST = 6
PROGRESS = 2
RECOVERY_S = 60.0


class Processes(Closing):
    """The workers and reducers of a run. Each is started again when it has ended, on any mount."""

    def __init__(self, cluster: Cluster, kind: str, workers: int, reducers: int) -> None:
        self.cluster = cluster
        self._kind = kind
        self._records = cluster.directory / "records"
        self._records.mkdir()
        self.records = Records(self._records)
        self._mounts: dict[str, ClusterMount] = {}
        self.workers = [f"w{number}" for number in range(workers)]
        self.reducers = [f"r{number}" for number in range(reducers)]
        self.running: dict[str, Daemon] = {}
        # Workers that were killed, and those whose place was taken while their mount was cut off.
        self._past: list[Daemon] = []
        # How often a process ended by itself, and with which status.
        self.ends: Counter[str] = Counter()
        for number, name in enumerate((*self.workers, *self.reducers)):
            self.start(name, cluster.mounts[number % len(cluster.mounts)])

    def start(self, name: str, mount: ClusterMount) -> None:
        folder = mount.path / RUN
        if name in self.reducers:
            command = irdmafs_command("train", "reduce", folder, "--threads", "1", "-v")
        else:
            worker = (training_worker.__file__, self._kind, str(folder), name, str(self._records))
            command = [sys.executable, *worker]
        process = Daemon(name, mount.host, command, self.cluster.directory / f"{name}.log")
        if name in self.running:
            self._past.append(self.running[name])
        process.start()
        self.running[name], self._mounts[name] = process, mount

    def revive(self, hurt: Collection[str], mount: ClusterMount) -> None:
        """Start again what has ended by itself. `hurt`: what others start again."""
        for name, process in self.running.items():
            if not process.alive and name not in hurt:
                assert process.exit_status is not None
                self.ends[f"{KINDS_OF_NAMES[name[0]]}: {process.exit_status}"] += 1
                self.start(name, mount)

    def kill(self, name: str) -> None:
        """Kill a process. It ends later if the mount that has its files does not answer."""
        self.running[name].kill9(wait=False)

    def take_places(self, mount: ClusterMount, other: ClusterMount, hurt: Collection[str]) -> None:
        """Start workers on another mount that have the names of those on this one, which go on, too."""
        for zombie in self._past:
            zombie.kill9(wait=False)
        for name in self.workers:
            if self._mounts[name] is mount and self.running[name].alive and name not in hurt:
                self.start(name, other)

    def finish(self, last_step: int) -> None:
        """Have the workers end after a step. Raises CommandFailed for those that do not."""
        self.records.stop(last_step)
        for name in self.workers:
            status = self.running[name].wait(RECOVERY_S)
            if status != 0:
                raise CommandFailed(f"{name} ended with {status}")

    def __exit__(self, *error: object) -> None:
        if error[1] is not None:
            print(self.logs())
            print(self._seen())
        super().__exit__(*error)

    def _seen(self) -> str:
        """Return what each mount shows of the run's pushes and of what is being made, and what it cannot
        read of them."""
        shell = ("timeout", "20", "sh", "-c")
        look = "ls -lR push next versions; cat push/*/* push/*.* next/*/*/* > /dev/null"
        return "\n".join(
            f"== {mount.name}\n"
            + run(*shell, f"exec 2>&1; cd {mount.path / RUN}/.train; {look}", check=False)
            for mount in self.cluster.mounts
        )

    def close(self) -> None:
        self.cluster.heal_all()
        processes = [*self.running.values(), *self._past]
        for process in processes:
            process.kill9(wait=False)
        for process in processes:
            process.kill9()

    def logs(self) -> str:
        return "\n".join(f"== {one.name}\n{one.log_tail()}" for one in self.running.values())


class TrainingFaults(Faults):
    """Kills and stops processes of a run and of the cluster below it, at random."""

    gap_s = (0.05, 0.5)

    def __init__(self, processes: Processes, seed: int) -> None:
        super().__init__(processes.cluster, seed, AT_ONCE)
        self._processes = processes
        self.kills = 0
        self._kinds = {
            "kill worker": lambda: self._kill_one_of(processes.workers),
            "kill reducer": lambda: self._kill_one_of(processes.reducers),
            "kill node": self._kill_node,
            "kill mount": self._kill_mount,
            "kill etcd": self._kill_etcd,
            "kill all etcd": self._kill_all_etcd,
            "pause node": lambda: self._pause("node", self._cluster.nodes),
            "pause mount": self._pause_mount,
        }

    def run(self, count: int) -> None:
        """So many kills, a few at a time: then all that was hurt is started again, and the run goes on
        before the next. Raises CommandFailed when it does not."""
        order: list[str] = []
        while self.kills < count:
            burst_ends = min(count, self.kills + BURST)
            while self.kills < burst_ends:
                if not order:
                    order = self._random.sample(ROUND, len(ROUND))
                self._do(order.pop())
            self._end_all()
            self._revive()
            self._wait_for_progress()

    def _wait_for_progress(self) -> None:
        """Wait until a worker has a version that was made after this began."""
        records = self._processes.records
        newest = records.newest()

        def goes_on() -> bool:
            self._revive()
            return records.newest() >= newest + PROGRESS

        wait_until(goes_on, f"version {newest} is the newest", RECOVERY_S)

    def _begin(self, kind: str, *rest: Any, **more: Any) -> None:
        self.kills += kind.startswith("kill")
        super()._begin(kind, *rest, **more)

    def _revive(self) -> None:
        self._processes.revive(self._hurt, self._random.choice(self._cluster.mounts))

    def _kill_one_of(self, names: list[str]) -> None:
        process = self._choose([self._processes.running[name] for name in names])
        if process is not None:
            self._processes.kill(process.name)
            mount = self._random.choice(self._cluster.mounts)
            self._begin(
                f"kill {KINDS_OF_NAMES[process.name[0]]}",
                [process],
                self._random.uniform(0, 1),
                lambda: self._processes.start(process.name, mount),
            )

    def _kill_all_etcd(self) -> None:
        members = self._cluster.etcd.members
        if any(member.name in self._hurt for member in members):
            return
        for member in members:
            member.kill9()

        def start() -> None:
            for member in members:
                member.start()

        self._begin("kill all etcd", members, self._any_duration_s(), start)

    def _pause_mount(self) -> None:
        """SIGSTOP until after the lease is over. The places of its workers are taken on another mount; they
        go on beside those who have their names now."""
        mount = self._choose(self._cluster.mounts)
        others = [one for one in self._cluster.mounts if one is not mount]
        if mount is None:
            return
        assert isinstance(mount, ClusterMount)
        mount.pause()
        self._processes.take_places(mount, self._random.choice(others), self._hurt)
        self._begin("pause mount", [mount], self._pause_s(), mount.resume)
