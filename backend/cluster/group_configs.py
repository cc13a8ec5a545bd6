"""The configuration of every placement group, as the replica of etcd has it."""

import errno
from collections.abc import Callable, Mapping

import trio

from ..etcd.engine import EtcdEngine
from ..kv import Compares, Conflict, Put
from ..kv.faults import Faults
from ..model.placement import Placement
from ..model.records import GROUP_BUCKET_BITS, GroupConfig, encode, group_key, pool_key
from .record_keeper import RecordKeeper, call
from .replica import Replica

# etcd accepts 128 operations in a transaction.
CREATED_AT_ONCE = 100
# Fewer, as one conflict fails the whole transaction.
CHANGED_AT_ONCE = 60
_LOOK_AGAIN_S = 1.0
_NOT_CREATED = GroupConfig(0, ()), 0


class Groups(RecordKeeper):
    """The configuration of every placement group, and its revision. Nodes create the groups of pools."""

    prefixes = (b"g", b"w")

    def __init__(self, faults: Faults | None = None) -> None:
        super().__init__(faults)
        self.configs: dict[int, tuple[GroupConfig, int]] = {}  # for reading only
        self.wanted: set[int] = set()
        # Called with a group's id and its former configuration, after that changed.
        self.group_changed: list[Callable[[int, GroupConfig], None]] = []
        # Called with a pool's number when a mount wants its groups.
        self.pool_wanted: list[Callable[[int], None]] = []

    def get(self, group: int) -> tuple[GroupConfig, int]:
        """Return a group's configuration and its mod_revision; no members and 0 before it is created."""
        return self.configs.get(group, _NOT_CREATED)

    def pools(self) -> set[int]:
        """Return the pools (see placement.pool_of) that have groups."""
        return {group >> GROUP_BUCKET_BITS for group in self.configs}

    def missing(self, pool: int, buckets: int) -> list[int]:
        """Return the groups of a pool that have not been created. One whose record is damaged has been."""
        wanted = (pool << GROUP_BUCKET_BITS | bucket for bucket in range(buckets))
        return [group for group in wanted if group_key(group) not in self._keys]

    async def want(
        self, engine: EtcdEngine, pool: int, placement: Placement, timeout_s: float
    ) -> None:
        """Have the nodes create the groups of a pool, if this is the first use of it; returns when all are
        known here. `placement` is as for `ensure`.

        Raises OSError: EHOSTUNREACH if there is no node to keep them, ETIMEDOUT.
        """
        with trio.move_on_after(timeout_s):
            while missing := self.missing(pool, placement.buckets):
                placement.target(missing[0])  # raises the error that says why there is no node
                if pool not in self.wanted:
                    await engine.transact((), [Put(pool_key(pool), b"")])
                # Nodes that start or stop do not change a group by themselves.
                with trio.move_on_after(_LOOK_AGAIN_S):
                    await self.changed()
            return
        raise OSError(
            errno.ETIMEDOUT, f"the store nodes have made no placement groups for {timeout_s:g} s"
        )

    async def ensure(self, replica: Replica, pool: int, placement: Placement) -> None:
        """Create the groups of a pool, if this is the first use of it, where Members.placement() has them.
        When others create them, too, the first decides. Return when all are known. Raises EHOSTUNREACH."""
        while missing := self.missing(pool, placement.buckets)[:CREATED_AT_ONCE]:
            made = [(group, GroupConfig(1, placement.target(group))) for group in missing]
            puts = [Put(group_key(group), encode(config)) for group, config in made]
            await replica.attempt([(put.key, 0) for put in puts], puts)

    async def change(
        self,
        replica: Replica,
        changes: Mapping[int, tuple[int, GroupConfig]],
        guards: Compares = (),
    ) -> set[int]:
        """Put new configurations of groups, each if its current one still has the given revision.

        Returns the groups that had changed meanwhile, which are left unchanged, when all is known here.
        Raises Conflict when one of `guards` does not hold; some configurations may have been put then.
        """
        late: set[int] = set()
        todo = list(changes)
        while todo:
            batch = todo[:CHANGED_AT_ONCE]
            try:
                await replica.transact(
                    [*((group_key(group), changes[group][0]) for group in batch), *guards],
                    [Put(group_key(group), encode(changes[group][1])) for group in batch],
                )
                del todo[: len(batch)]
            except Conflict as conflict:
                if not conflict.key.startswith(self.prefixes):
                    raise
                group = int.from_bytes(conflict.key[1:], "big")
                late.add(group)
                todo.remove(group)
        if late:
            await replica.barrier()
        return late

    def take(self, key: bytes, value: bytes | None, revision: int) -> None:
        group = int.from_bytes(key[1:], "big")
        if key[:1] == b"w":
            if value is None:
                self.wanted.discard(group)
            else:
                self.wanted.add(group)
                call(self.pool_wanted, group)
            return
        before, known = self.get(group)
        if value is None:
            if self.configs.pop(group, None) is None:
                return
        else:
            config = self.faults.sound(key, value, GroupConfig)
            # A damaged record counts as none for reading, but the key exists: no leader can
            # derive a change from it, and no process creates it anew.
            if config is None or known == revision:
                return
            self.configs[group] = (config, revision)
        for listener in self.group_changed:
            listener(group, before)
