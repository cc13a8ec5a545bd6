"""How a placement group's configuration may change: every transition, and the leader's next one.

Pure functions. What they return is put by a transaction that compares the revision of the record they
were given, so a decision taken on old knowledge is never carried out. docs/replication.md has the
protocol; tests/model_replication.py explores it with these very functions.
"""

from collections.abc import Collection, Sequence

from .records import GroupConfig

__all__ = [
    "degraded",
    "demoted",
    "dropped",
    "emptied",
    "has_still",
    "leader",
    "led_by",
    "next_step",
    "promoted",
    "refenced",
    "with_joining",
    "without",
]


def without(config: GroupConfig, *nodes: int) -> GroupConfig:
    """These members are dead or out of reach. One member in sync must remain: who has the data last
    is waited for."""
    assert set(nodes) <= set(config.members), f"{nodes} are not all members of {config}"
    return _next(
        config,
        tuple(node for node in config.in_sync if node not in nodes),
        tuple(node for node in config.joining if node not in nodes),
    )


def with_joining(config: GroupConfig, *nodes: int) -> GroupConfig:
    """These nodes are written to from now on, and copy what was published before."""
    return _next(config, config.in_sync, config.joining + nodes)


def promoted(config: GroupConfig, node: int) -> GroupConfig:
    """Only for the node itself to put, when it holds everything that is named at a revision not older
    than `config`: whatever is named later was written to it, too."""
    assert node in config.joining, f"{node:x} is not joining {config}"
    return _next(
        config,
        (*config.in_sync, node),
        tuple(other for other in config.joining if other != node),
    )


def demoted(config: GroupConfig, node: int) -> GroupConfig:
    """The node found that it lacks extents which it should have. Not for the only one in sync: no
    other could fill it."""
    assert node in config.in_sync, f"{node:x} is not in sync in {config}"
    return _next(
        config,
        tuple(other for other in config.in_sync if other != node),
        (*config.joining, node),
    )


def dropped(config: GroupConfig, *nodes: int) -> GroupConfig:
    """These members are not wanted any more; what they kept of the group is freed when they see it."""
    assert set(nodes) < set(config.in_sync), f"{nodes} are not surplus in {config}"
    return without(config, *nodes)


def led_by(config: GroupConfig, node: int) -> GroupConfig:
    """Another member in sync becomes the primary; the order of the others stays."""
    assert node in config.in_sync, f"{node:x} is not in sync in {config}"
    rest = tuple(other for other in config.in_sync if other != node)
    return _next(config, (node, *rest), config.joining)


def refenced(config: GroupConfig) -> GroupConfig:
    """The same members under a new epoch: acknowledgements given so far are void (see has_still). For
    a member that may have lost extents which were not named yet."""
    return _next(config, config.in_sync, config.joining)


def emptied(config: GroupConfig, *nodes: int) -> GroupConfig:
    """All that the group had is given up, and nodes that need have nothing of it begin anew.

    Only when no inode names an extent of the group at a revision not older than `config`, which is
    `refenced`: put when all in sync were gone for good, and still are when this is put. Then nothing
    can be named under `config`, and no acknowledgement from before it counts.
    """
    assert nodes, f"nobody would be in sync after {config}"
    assert len(set(nodes)) == len(nodes), f"a node would be a member twice: {nodes}"
    assert not set(nodes) & set(config.in_sync), f"{nodes} are not gone from {config}"
    return GroupConfig(config.epoch + 1, nodes)


def has_still(before: GroupConfig, after: GroupConfig, node: int) -> bool:
    """Whether what a node acknowledged under `before` counts under `after`, too.

    Not if a configuration in between is unknown (it may have left, freed everything and come back),
    not if it left, and not if it put the change itself because it may have lost something.
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
    """Who is to change the configuration: the first live member in sync; nobody if none lives."""
    return next((node for node in config.in_sync if node in live), None)


def degraded(config: GroupConfig, live: Collection[int], replicas: int) -> int:
    """How many replicas are missing, counting only live members in sync."""
    return max(0, replicas - sum(node in live for node in config.in_sync))


def next_step(
    config: GroupConfig,
    live: Collection[int],
    target: Sequence[int],
    joinable: Collection[int] | None = None,
) -> GroupConfig | None:
    """What the leader changes next, one kind of change at a time; None: nothing.

    `target` is where placement wants the group, the primary first; a node that died a moment ago may
    be in it and is not replaced until it is not. `joinable` are the nodes that have room for one more
    group to fill (None: all). Wrong beliefs about who lives or what the target is cost work, never
    data: only `promoted` adds to in_sync, and one member in sync always stays.
    """
    dead = [node for node in config.members if node not in live]
    # Who is left with dead members in sync only waits for one of them to come back.
    if dead and leader(config, live) is not None:
        return without(config, *dead)
    if leader(config, live) is None or not target:
        return None

    unwanted = [node for node in config.joining if node not in target]
    if unwanted:
        return without(config, *unwanted)
    new = [
        node
        for node in target
        if node in live and node not in config.members and (joinable is None or node in joinable)
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


def _next(config: GroupConfig, in_sync: tuple[int, ...], joining: tuple[int, ...]) -> GroupConfig:
    members = in_sync + joining
    assert in_sync, f"nobody would be in sync after {config}"
    assert len(set(members)) == len(members), f"a node would be a member twice: {members}"
    assert set(in_sync) <= set(config.members), f"{in_sync} were not all members of {config}"
    return GroupConfig(config.epoch + 1, in_sync, joining)
