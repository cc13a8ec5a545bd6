"""Whoever follows a directory is waited for when something changes there: not for long if he means harm."""

import trio
from harness.clusters import Cluster, Plan, counters
from harness.mountpoint import eventually

from irdmafs.backend.cluster.config import ClusterConfig
from irdmafs.backend.cluster.lease import MOUNT, Session
from irdmafs.backend.cluster.membership import followed_key, seen_key
from irdmafs.backend.kv import Put
from irdmafs.backend.model.records import MountRecord
from irdmafs.backend.namespace import ROOT_INO

COMPLAINT = "has acknowledged nothing"


def test_a_reader_that_never_answers_does_not_stop_writers() -> None:
    plan = Plan(nodes=1, mounts=1, replicas=1, buckets=4, tls=True, namespaces=False)
    with Cluster(plan) as made:
        [mount] = made.mounts

        async def harm() -> None:
            section = ClusterConfig.load(str(made.config_of("reader"))).cluster
            record = MountRecord("elsewhere", "/hostile", 1, "0", "reader", "reader")
            async with section.engine("reader") as engine, trio.open_nursery() as nursery:
                session = Session(engine, MOUNT, record, plan.lease_ttl_s)
                await nursery.start(session.run)
                lease = session.lease
                revision = await engine.transact(
                    (), [Put(followed_key(ROOT_INO, lease), b"", lease)]
                )
                await publish("first", revision)
                assert mount.log_tail().count(COMPLAINT) == 1
                assert "/hostile on elsewhere (certificate 'reader')" in mount.log_tail()
                await publish("second", revision)
                assert mount.log_tail().count(COMPLAINT) == 1
                # Once he has seen everything he is waited for again.
                seen = (1 << 62).to_bytes(8, "big")
                await engine.transact((), [Put(seen_key(lease), seen, lease)])
                await publish("third", revision)
                assert mount.log_tail().count(COMPLAINT) == 1
                nursery.cancel_scope.cancel()

        async def publish(name: str, revision: int) -> None:
            def is_known() -> bool:
                return bool(counters(mount)["applied_revision"] >= revision)

            # In a thread: the session of the reader is renewed meanwhile.
            await trio.to_thread.run_sync(eventually, is_known, "the mount knows it")
            await trio.to_thread.run_sync((mount.path / name).write_bytes, b"x")

        trio.run(harm)
