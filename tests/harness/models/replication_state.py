"""What the model of the replication protocol (model_replication) is made of: rules, bounds, states."""

from typing import NamedTuple

UP, DOWN, DAMAGED, GONE = range(4)
SENDING, PUBLISHED, GAVE_UP = range(3)
NOTHING = -1

# (content, configuration) or (node, configuration)
Message = tuple[int, int]
# In place of a node: whoever gives a group up, or has seen that nothing is named there any more.
REMOVED, EMPTY = -1, -2


class Rules(NamedTuple):
    """Each True in the protocol; the field's name says what is done."""

    commit_compares_configuration: bool = True
    commit_compares_session: bool = True
    writer_includes_joining: bool = True
    acknowledgement_is_of_one_configuration: bool = True
    abort_only_when_not_committing: bool = True
    node_waits_for_newer_configuration: bool = True
    node_fences_older_configuration: bool = True
    node_serves_only_sealed: bool = True
    change_compares_configuration: bool = True
    last_in_sync_stays: bool = True
    promotion_compares_contents: bool = True
    promotion_looks_at_its_own_revision: bool = True
    restart_verifies: bool = True
    restart_refences: bool = True
    restart_keeps_pending: bool = True
    pending_lives_with_its_session: bool = True
    old_version_stays_until_superseded: bool = True
    pin_compares_version: bool = True
    pinned_stays: bool = True
    group_is_fenced_before_it_is_emptied: bool = True
    group_is_emptied_when_nothing_is_named: bool = True


# What can happen, each as often as Bounds.events allows in all: a node's process dies; so does its host,
# with the store; a node dies and its store is damaged; a session ends; a writer gives up; a reader pins.
CRASH, LOSS, DAMAGE = "crash", "loss", "damage"
EXPIRY, ABORT, PIN = "expiry", "abort", "pin"
EVENTS = (CRASH, LOSS, DAMAGE, EXPIRY, ABORT, PIN)
# Not one of the usual: all in sync are taken for dead and removed, and what only they have is given up.
REMOVAL = "removal"


class Bounds(NamedTuple):
    """How much may happen. A writer has `contents` content numbers, one of each of its sessions.
    `epochs` bounds the configurations. `torn`: receiving takes time. `late_puts`: data arrives even
    when its writer does not wait for it any more; `late_promotions`: a transaction by which a node
    gets in sync is still under way when the node is not what it was; `leftovers`: a node that left
    goes on receiving, and frees what it has at some time, not at once."""

    writers: int = 2
    contents: int = 1
    epochs: int = 3
    events: int = 1
    kinds: tuple[str, ...] = EVENTS
    torn: bool = False
    late_puts: bool = False
    late_promotions: bool = False
    leftovers: bool = False
    nodes: int = 3
    targets: tuple[tuple[int, ...], ...] = ((0, 1), (1, 2))


class Etcd(NamedTuple):
    """All that is in etcd, at one revision. `config` indexes Model.configs; `sessions` is the set of
    contents whose session lives, as bits; `pin` a content or NOTHING."""

    config: int
    named: int
    sessions: int
    pin: int


class Node(NamedTuple):
    """`view` indexes State.log; `sealed` and `torn` (being received) are sets of contents, as bits."""

    mode: int
    view: int
    sealed: int
    torn: int


class Writer(NamedTuple):
    """`content` is being written to the members of `config`; `acks` are nodes, as bits."""

    phase: int
    content: int
    config: int
    acks: int


class State(NamedTuple):
    """`log`: etcd at the revisions that somebody may still look at, the present one last. `puts` and
    `promotions` are messages under way: (content, config) and (node, config). The latter also say of
    the present configuration that all in sync were removed, and that nothing is named. `owed` are the nodes
    that must keep the pinned content, `lost` the contents that no node in sync could save; `left` is how
    many events may still happen."""

    log: tuple[Etcd, ...]
    nodes: tuple[Node, ...]
    writers: tuple[Writer, ...]
    puts: frozenset[Message]
    promotions: frozenset[Message]
    owed: int
    lost: int
    left: int
