"""A store node watches the room and the alarms of its etcd (real etcd)."""

import logging

import pytest
from harness.etcd_server import EtcdServer

from irdmafs.backend.etcd import etcd_pb2 as pb
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.etcd.rpc import ALARM
from irdmafs.backend.node.housekeeping import EtcdWatch


async def test_a_node_has_etcd_s_room_in_its_figures_and_logs_an_alarm_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "irdmafs.backend.node.housekeeping"), EtcdServer() as server:
        async with EtcdEngine(server.endpoints, b"/") as engine:
            watch = EtcdWatch(engine)
            await watch.look()
            found = watch.figures
            assert 0 < found.etcd_used_bytes <= found.etcd_file_bytes < found.etcd_quota_bytes
            assert found.etcd_alarms == {"CORRUPT": 0, "NOSPACE": 0}
            assert not caplog.records
            request = pb.AlarmRequest(action=pb.AlarmRequest.ACTIVATE, memberID=1, alarm=pb.NOSPACE)
            await engine.calls.call(ALARM, request)
            await watch.look()
            await watch.look()
            assert watch.figures.etcd_alarms == {"CORRUPT": 0, "NOSPACE": 1}
            [told] = caplog.messages
            assert "NOSPACE" in told
            assert "irdmafs cluster repair-etcd" in told
            await engine.admin.room.repair(lambda line: None)
            await watch.look()
            assert caplog.messages[1:] == ["etcd has room, and no alarm"]
