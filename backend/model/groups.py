"""The transitions of a placement group's configuration, and the choice of the leader's next one.

Pure functions. Their results are put by a transaction that compares the revision of the record that they
were given, so a decision on an old record is never applied. docs/replication.md has the
protocol; tests/harness/models/replication.py explores it with these very functions.
"""

from collections.abc import Collection, Sequence

from .records import GroupConfig


def without(config: GroupConfig, *nodes: int) -> GroupConfig:
    """Remove members that are dead or out of reach. One member in sync must remain: the last one that has
    the data is waited for."""
    assert set(nodes) <= set(config.members), f"{nodes} are not all members of {config}"
    return _next(config, _less(config.in_sync, *nodes), _less(config.joining, *nodes))


def with_joining(config: GroupConfig, *nodes: int) -> GroupConfig:
    """Add nodes that are written to from now on, and copy earlier contents."""
    return _next(config, config.in_sync, config.joining + nodes)


def promoted(config: GroupConfig, node: int) -> GroupConfig:
    """Make a joining node a member in sync. Only the node itself puts this, when it holds everything that
    is named at a revision not older than `config`: everything named later was written to it, too."""
    assert node in config.joining, f"{node:x} is not joining {config}"
    return _next(config, (*config.in_sync, node), _less(config.joining, node))


def demoted(config: GroupConfig, node: int) -> GroupConfig:
    """Make a member in sync that lacks extents a joining one. Not for the only one in sync: no other could
    fill it."""
    assert node in config.in_sync, f"{node:x} is not in sync in {config}"
    return _next(config, _less(config.in_sync, node), (*config.joining, node))


def dropped(config: GroupConfig, *nodes: int) -> GroupConfig:
    """Remove members that are not wanted any more; they free their extents when they see it."""
    assert set(nodes) < set(config.in_sync), f"{nodes} are not surplus in {config}"
    return without(config, *nodes)


def led_by(config: GroupConfig, node: int) -> GroupConfig:
    """Make another member in sync the primary; the order of the others stays."""
    assert node in config.in_sync, f"{node:x} is not in sync in {config}"
    return _next(config, (node, *_less(config.in_sync, node)), config.joining)


def refenced(config: GroupConfig) -> GroupConfig:
    """Keep the members under a new epoch: earlier acknowledgements are void (see has_still). For a member
    that may have lost extents which were not named yet."""
    return _next(config, config.in_sync, config.joining)


def emptied(config: GroupConfig, *nodes: int) -> GroupConfig:
    """Give up all extents of the group, which begins anew on nodes that need not have any.

    Only if no inode names an extent of the group at a revision not older than `config`, which is
    `refenced`: put when all members in sync were gone for good, as they still are when this is put. Then
    nothing can be named under `config`, and no earlier acknowledgement counts.
    """
    assert nodes, f"nobody would be in sync after {config}"
    assert len(set(nodes)) == len(nodes), f"a node would be a member twice: {nodes}"
    assert not set(nodes) & set(config.in_sync), f"{nodes} are not gone from {config}"
    return GroupConfig(config.epoch + 1, nodes)


def has_still(before: GroupConfig, after: GroupConfig, node: int) -> bool:
    """Return whether an acknowledgement of a node under `before` counts under `after`, too.

    Not if a configuration in between is unknown (the node may have left, freed everything and come back),
    not if it left, and not if it put the change itself because it may have lost extents.
    """
    if node not in after.members or node not in before.members:
        return False
    if after.epoch == before.epoch:
        return True
    return (
        after.epoch == before.epoch + 1
        and (after.in_sync, after.joining) != (before.in_sync, before.joining)
        and not (node in before.in_sync and node in after.joining)
    )


def leader(config: GroupConfig, live: Collection[int]) -> int | None:
    """Return the node that changes the configuration: the first live member in sync, if any."""
    return next((node for node in config.in_sync if node in live), None)


def degraded(config: GroupConfig, live: Collection[int], replicas: int) -> int:
    """Return how many replicas are missing, counting only live members in sync."""
    return max(0, replicas - sum(node in live for node in config.in_sync))


def next_step(
    config: GroupConfig,
    live: Collection[int],
    target: Sequence[int],
    joinable: Collection[int] | None = None,
) -> GroupConfig | None:
    """Return the leader's next change, one kind of change at a time; None: nothing is to be changed.

    `target` are the nodes on which placement wants the group, the primary first; a node that died a moment
    ago may be among them, and is not replaced as long as it is. `joinable` are the nodes that have room to
    fill one more group (None: all). Wrong beliefs about live nodes or the target cost work, never data:
    only `promoted` adds to in_sync, and one member in sync always stays.
    """
    members = config.members
    # If all members in sync are dead, the others wait for one of them to come back.
    if leader(config, live) is None:
        return None
    dead = [node for node in members if node not in live]
    if dead:
        return without(config, *dead)
    if not target:
        return None

    unwanted = [node for node in config.joining if node not in target]
    if unwanted:
        return without(config, *unwanted)
    new = [
        node
        for node in target
        if node in live and node not in members and (joinable is None or node in joinable)
    ]
    if new:
        return with_joining(config, *new)
    if not set(target) <= set(config.in_sync):
        return None
    surplus = [node for node in config.in_sync if node not in target]
    if surplus:
        return dropped(config, *surplus)
    if config.in_sync[0] != target[0]:
        return led_by(config, target[0])
    return None


def _less(nodes: Sequence[int], *gone: int) -> tuple[int, ...]:
    return tuple(node for node in nodes if node not in gone)


def _next(config: GroupConfig, in_sync: tuple[int, ...], joining: tuple[int, ...]) -> GroupConfig:
    members = in_sync + joining
    assert in_sync, f"nobody would be in sync after {config}"
    assert len(set(members)) == len(members), f"a node would be a member twice: {members}"
    assert set(in_sync) <= set(config.members), f"{in_sync} were not all members of {config}"
    return GroupConfig(config.epoch + 1, in_sync, joining)
