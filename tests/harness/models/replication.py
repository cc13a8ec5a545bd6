"""The replication protocol of docs/replication.md as a state machine, for explorer.explore.

One group, three nodes, two writers of one file. What is atomic here is atomic there: a transaction in
etcd, a node applying one revision, a node sealing an extent. All else happens in any order:

* A message is a fact that may be acted on at any later time, any number of times, or never: that is
  loss, delay, reordering and duplication.
* A process that does not move is paused, cut off or slow. Nothing here looks at a clock, and whoever
  holds the lead in its own view may believe any other node dead: leases are not needed for safety.
* Decisions are taken on the decider's view, which may lag behind etcd by any number of revisions.

The transitions of the configuration are backend.groups', not copies of them. `Rules` names what the
protocol demands; taking one away must lead to a state that breaks an invariant (test_protocols.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

from harness.models.explorer import Broken, Machine, with_item
from irdmafs.backend.model import groups
from irdmafs.backend.model.records import GroupConfig

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


# The events, each as often as Bounds.events allows in all: a node's process dies; so does its host,
# with the store; a node dies and its store is damaged; a session ends; a writer gives up; a reader pins.
CRASH, LOSS, DAMAGE = "crash", "loss", "damage"
EXPIRY, ABORT, PIN = "expiry", "abort", "pin"
EVENTS = (CRASH, LOSS, DAMAGE, EXPIRY, ABORT, PIN)
# Not one of the usual: all in sync are taken for dead and removed, and what only they have is given up.
REMOVAL = "removal"


class Bounds(NamedTuple):
    """The limits of what may happen. A writer has `contents` content numbers, one of each of its sessions.
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


Step = tuple[str, State]
# The log, and the nodes that look at it.
Seen = tuple[tuple[Etcd, ...], tuple[Node, ...]]


class Model(Machine[State]):
    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self.bounds = bounds
        self.rules = rules or Rules()
        # A broken rule may make a difference where the protocol makes none.
        self._eager = self.rules == Rules()
        self.configs: list[GroupConfig] = []
        self._numbers: dict[GroupConfig, int] = {}
        self._changes: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._members: list[int] = []
        self._in_sync: list[int] = []
        self._shown: list[str] = []
        # Many states have these in common.
        self._moved: dict[tuple[Seen, int], Seen] = {}
        self._swapped: dict[Seen, Seen] = {}

    # --- configurations, by number

    def number(self, config: GroupConfig) -> int:
        number = self._numbers.get(config)
        if number is None:
            number = self._numbers[config] = len(self.configs)
            self.configs.append(config)
            self._members.append(sum(1 << node for node in config.members))
            self._in_sync.append(sum(1 << node for node in config.in_sync))
            joining = f", joining {config.joining}" if config.joining else ""
            self._shown.append(f"epoch {config.epoch}, in sync {config.in_sync}{joining}")
        return number

    def changes(self, config: int, node: int) -> list[tuple[str, int]]:
        """What the node may put as leader, whoever it believes dead and whatever target it sees."""
        known = self._changes.get((config, node))
        if known is not None:
            return known
        found: dict[int, str] = {}
        present = self.configs[config]
        every = range(self.bounds.nodes)
        for dead in range(1 << self.bounds.nodes):
            live = {other for other in every if not dead >> other & 1}
            if node not in live:
                continue
            for target in self.bounds.targets:
                new = None
                if groups.leader(present, live) == node:
                    new = groups.next_step(present, live, target)
                elif (
                    not self.rules.last_in_sync_stays
                    and groups.leader(present, live) is None
                    and node in present.joining
                ):
                    new = GroupConfig(present.epoch + 1, (node,))
                if new is not None:
                    reason = f"believes {sorted(set(every) - live)} dead, wants {target}"
                    found.setdefault(self.number(new), reason)
        result = [(reason, new) for new, reason in found.items()]
        self._changes[config, node] = result
        return result

    # --- the machine

    def initial(self) -> State:
        bounds = self.bounds
        config = self.number(GroupConfig(1, bounds.targets[0]))
        # A writer that begins later is one whose messages are late.
        first = range(0, bounds.writers * bounds.contents, bounds.contents)
        return State(
            log=(Etcd(config, NOTHING, (1 << bounds.writers * bounds.contents) - 1, NOTHING),),
            nodes=(Node(UP, 0, 0, 0),) * bounds.nodes,
            writers=tuple(Writer(SENDING, content, config, 0) for content in first),
            puts=frozenset((content, config) for content in first),
            promotions=frozenset(),
            owed=0,
            lost=0,
            left=bounds.events,
        )

    def may(self, state: State, kind: str) -> bool:
        return state.left > 0 and kind in self.bounds.kinds

    def steps(self, state: State) -> Iterator[Step]:
        for index, writer in enumerate(state.writers):
            yield from self._writer_steps(state, index, writer)
        for index, node in enumerate(state.nodes):
            if node.mode == UP:
                yield from self._node_steps(state, index, node)
                yield from self._change_steps(state, index, node)
                if state.left:
                    yield from self._crash_steps(state, index, node)
            elif node.mode in (DOWN, DAMAGED):
                yield from self._restart_steps(state, index, node)
        if state.promotions:
            yield from self._late_promotions(state)
        if state.promotions or state.left:
            yield from self._removal_steps(state)
        yield from self._pin_steps(state)
        if state.left:
            yield from self._expiry_steps(state)

    # --- writers

    def _writer_steps(self, state: State, index: int, writer: Writer) -> Iterator[Step]:
        head = state.log[-1]
        name = f"writer {index}"
        if writer.phase == GAVE_UP:
            # Its abort messages are still under way.
            for number, node in enumerate(state.nodes):
                bit = 1 << writer.content
                if node.mode == UP and node.sealed & bit and not self._kept_for(state, node, bit):
                    after = self._keeping(state, number, node.sealed & ~bit)
                    yield (
                        f"node {number}: drops content {writer.content}, as its writer says",
                        after,
                    )
            if self.rules.abort_only_when_not_committing:
                return
        if writer.phase == PUBLISHED:
            return
        if writer.phase == SENDING:
            yield from self._send_steps(state, index, writer)
        if writer.phase in (SENDING, GAVE_UP) and self._may_commit(head, writer):
            self._check_commit(state, head, writer.content)
            published = Writer(PUBLISHED, writer.content, NOTHING, 0)
            done = self._with_writer(state, index, published)
            done = self._put(done, head._replace(named=writer.content))
            under = self.show(writer.config)
            yield f"{name}: commits content {writer.content} under {under}", done
        if writer.phase != SENDING:
            return
        if not head.sessions >> writer.content & 1:
            last = (writer.content + 1) % self.bounds.contents == 0
            content, config = writer.content, writer.config
            over = self._with_writer(state, index, Writer(GAVE_UP, content, config, 0))
            if not last:
                content, config = content + 1, state.log[0].config
                again = Writer(SENDING, content, config, 0)
                over = self._with_put(self._with_writer(state, index, again), content, config)
            yield f"{name}: learns that its session is over", over
        elif self.may(state, ABORT):
            gone = self._with_writer(state, index, writer._replace(phase=GAVE_UP))
            yield f"{name}: gives content {writer.content} up", gone._replace(left=state.left - 1)

    def _send_steps(self, state: State, index: int, writer: Writer) -> Iterator[Step]:
        """Send to the members of a configuration that it may know; what was acknowledged under the one
        before counts where groups.has_still says so."""
        before = self.configs[writer.config]
        for config in {etcd.config for etcd in state.log}:
            now = self.configs[config]
            if now.epoch <= before.epoch:
                continue
            acks = 0
            for node in now.members:
                if writer.acks >> node & 1 and (
                    groups.has_still(before, now, node)
                    or not self.rules.acknowledgement_is_of_one_configuration
                ):
                    acks |= 1 << node
            sending = self._with_writer(state, index, Writer(SENDING, writer.content, config, acks))
            sending = self._with_put(sending, writer.content, config)
            yield f"writer {index}: sends content {writer.content} to {self.show(config)}", sending

    def _may_commit(self, head: Etcd, writer: Writer) -> bool:
        rules = self.rules
        needed = self._members if rules.writer_includes_joining else self._in_sync
        if needed[writer.config] & ~writer.acks:
            return False
        if rules.commit_compares_configuration and head.config != writer.config:
            return False
        return not rules.commit_compares_session or bool(head.sessions >> writer.content & 1)

    # --- nodes

    def _node_steps(self, state: State, index: int, node: Node) -> Iterator[Step]:
        view = state.log[node.view]
        here = 1 << index
        if node.view + 1 < len(state.log):
            moved = self._applied(state, index, node)
            yield f"node {index}: applies a revision", self._with_node(state, index, moved)

        for content, config in state.puts:
            if not self._accepts(view, here, content, config):
                continue
            bit = 1 << content
            if node.torn & bit:
                continue
            if self.bounds.torn and not node.sealed & bit:
                receiving = self._keeping(state, index, node.sealed, node.torn | bit)
                yield f"node {index}: begins to receive content {content}", receiving
                continue
            sealed = self._keeping(state, index, node.sealed | bit)
            after = self._acknowledged(sealed, here, content, config)
            if after != state:
                yield f"node {index}: seals content {content}, acknowledges", after
        for content in range(node.torn.bit_length()):
            bit = 1 << content
            if not node.torn & bit:
                continue
            if not self.rules.node_serves_only_sealed:
                raise Broken(f"a reader gets part of content {content} from node {index}")
            # It may have begun under an older configuration: what counts is who is told of it.
            after = self._keeping(state, index, node.sealed | bit, node.torn & ~bit)
            for _, config in sorted(put for put in state.puts if put[0] == content):
                if self._members[config] & here and self._is_known(config, view):
                    after = self._acknowledged(after, here, content, config)
            yield f"node {index}: has all of content {content}, seals, acknowledges", after
            dropped = self._keeping(state, index, node.sealed, node.torn & ~bit)
            yield f"node {index}: loses the connection that brings content {content}", dropped

        if self._members[view.config] & here and view.named != NOTHING:
            bit = 1 << view.named
            have = any(
                other.mode == UP and other.sealed & bit and number != index
                for number, other in enumerate(state.nodes)
            )
            if not node.sealed & bit and have:
                copied = self._keeping(state, index, node.sealed | bit)
                yield f"node {index}: copies content {view.named} from another", copied
        left_behind = node.sealed & ~self._bit(view.pin)
        if left_behind and not self._members[view.config] & here:
            freed = self._keeping(state, index, node.sealed & ~left_behind)
            yield f"node {index}: frees what it kept as a member", freed
        if not self.rules.pending_lives_with_its_session:
            for content in range(node.sealed.bit_length()):
                bit = 1 << content
                if node.sealed & bit and not self._kept_for(state, node, bit):
                    freed = self._keeping(state, index, node.sealed & ~bit)
                    yield (
                        f"node {index}: frees content {content}, which nobody names for long",
                        freed,
                    )
        named = self._bit(view.named)
        if (
            not self.rules.old_version_stays_until_superseded
            and node.sealed & named
            and node.sealed != named
        ):
            newer = self._keeping(state, index, node.sealed & ~named)
            yield f"node {index}: frees content {view.named}, as a newer one is here", newer

    def _accepts(self, view: Etcd, here: int, content: int, config: int) -> bool:
        if not view.sessions >> content & 1:
            return False
        if config == view.config:
            return bool(self._members[config] & here)
        if not self._is_known(config, view):
            waits = self.rules.node_waits_for_newer_configuration
            return not waits and bool(self._members[config] & here)
        member = self._members[view.config] & self._members[config] & here
        return not self.rules.node_fences_older_configuration and bool(member)

    def _is_known(self, config: int, view: Etcd) -> bool:
        return self.configs[config].epoch <= self.configs[view.config].epoch

    def _acknowledged(self, state: State, here: int, content: int, config: int) -> State:
        for index, writer in enumerate(state.writers):
            if writer[:3] == (SENDING, content, config) and not writer.acks & here:
                return self._with_writer(state, index, Writer(*writer[:3], writer.acks | here))
        return state

    def _applied(self, state: State, index: int, node: Node) -> Node:
        """The node follows etcd by one revision, and frees what it shows not to be needed."""
        old, new = state.log[node.view], state.log[node.view + 1]
        if self._is_removed(state, index, new.config):
            return Node(DOWN, NOTHING, node.sealed, 0)
        return self._followed(index, node, old, new)

    def _followed(self, index: int, node: Node, old: Etcd, new: Etcd) -> Node:
        pinned = 1 << new.pin if new.pin != NOTHING and self.rules.pinned_stays else 0
        free = 0
        if old.named != new.named and old.named != NOTHING:
            free |= 1 << old.named
        if old.pin != new.pin and old.pin not in (NOTHING, new.named):
            free |= 1 << old.pin
        free |= (old.sessions & ~new.sessions) & ~self._bit(new.named)
        torn = node.torn & new.sessions
        if not self._members[new.config] >> index & 1 and not self.bounds.leftovers:
            free, torn = -1, 0
        return Node(UP, node.view + 1, node.sealed & ~(free & ~pinned), torn)

    def _kept_for(self, state: State, node: Node, bit: int) -> int:
        view = state.log[node.view]
        return bit & (self._bit(view.named) | self._bit(view.pin))

    # --- configurations

    def _change_steps(self, state: State, index: int, node: Node) -> Iterator[Step]:
        head, view = state.log[-1], state.log[node.view]
        present = self.configs[view.config]
        if present.epoch >= self.bounds.epochs:
            return
        if head.config != view.config and self.rules.change_compares_configuration:
            return
        for reason, new in self.changes(view.config, index):
            changed = self._put(state, head._replace(config=new))
            yield f"node {index}: {reason}: {self.show(new)}", changed
        if index not in present.joining:
            return
        shown = view
        if not self.rules.promotion_looks_at_its_own_revision:
            # It made its list before it was told to join.
            shown = state.log[0]
        missing = self._bit(shown.named) & ~node.sealed & ~state.lost
        if missing and self.rules.promotion_compares_contents:
            return
        if self.bounds.late_promotions:
            promotions = state.promotions | {(index, view.config)}
            if promotions != state.promotions:
                asking = state._replace(promotions=promotions)
                yield f"node {index}: has all and asks to be in sync", asking
            return
        new = self.number(groups.promoted(present, index))
        promoted = self._put(state, head._replace(config=new))
        yield f"node {index}: has all and is in sync: {self.show(new)}", promoted

    def _late_promotions(self, state: State) -> Iterator[Step]:
        head = state.log[-1]
        for node, config in state.promotions:
            if config == head.config and node not in (REMOVED, EMPTY):
                new = self.number(groups.promoted(self.configs[config], node))
                promoted = self._put(state, head._replace(config=new))
                yield f"etcd: node {node} is in sync: {self.show(new)}", promoted

    def _is_removed(self, state: State, node: int, config: int) -> bool:
        """Whether the node was in sync when all who were had been removed. If it lives it learns that
        with the configuration which was put then: its session was over before, and there is no new one."""
        return (REMOVED, config) in state.promotions and bool(self._in_sync[config] >> node & 1)

    def _removal_steps(self, state: State) -> Iterator[Step]:
        head = state.log[-1]
        present = self.configs[head.config]
        removed, empty = (REMOVED, head.config), (EMPTY, head.config)
        if present.epoch >= self.bounds.epochs:
            return
        if removed not in state.promotions:
            if not self.may(state, REMOVAL):
                return
            config, after = head.config, state
            if self.rules.group_is_fenced_before_it_is_emptied:
                config = self.number(groups.refenced(present))
                after = self._put(state, head._replace(config=config))
            elif any(state.nodes[node].mode == UP for node in present.in_sync):
                return  # how it learns of it is not what this is about
            promotions = state.promotions | {(REMOVED, config)}
            after = after._replace(promotions=promotions, left=state.left - 1)
            yield f"admin: removes all in sync: {self.show(config)}", after
            return
        if head.named != NOTHING:
            unlinked = self._put(state, head._replace(named=NOTHING))
            yield f"admin: unlinks what names content {head.named}", unlinked
        is_empty = head.named == NOTHING or not self.rules.group_is_emptied_when_nothing_is_named
        if is_empty and empty not in state.promotions:
            seen = state._replace(promotions=state.promotions | {empty})
            yield "elected node: sees that nothing is named", seen
        if empty in state.promotions:
            for target in self.bounds.targets:
                others = (node for node in target if node not in present.in_sync)
                nodes = [node for node in others if state.nodes[node].mode != GONE]
                if nodes:
                    new = self.number(groups.emptied(present, *nodes))
                    begun = self._put(state, head._replace(config=new))
                    yield f"elected node: begins anew: {self.show(new)}", begun

    # --- faults

    def _crash_steps(self, state: State, index: int, node: Node) -> Iterator[Step]:
        if (
            not node.sealed | node.torn
            and not self._members[state.log[node.view].config] >> index & 1
        ):
            return  # to be dead, slow or unemployed is one
        owed = state.owed & ~(1 << index)
        left = state.left - 1
        if self.may(state, CRASH):
            down = self._with_node(state, index, Node(DOWN, NOTHING, node.sealed, 0))
            yield f"node {index}: dies", down._replace(left=left)
        if self.may(state, LOSS):
            gone = self._with_node(state, index, Node(GONE, NOTHING, 0, 0))
            yield f"node {index}: dies with its store", gone._replace(left=left, owed=owed)
        if self.may(state, DAMAGE) and node.sealed:
            damaged = self._with_node(state, index, Node(DAMAGED, NOTHING, 0, 0))
            damaged = damaged._replace(left=left, owed=owed)
            yield f"node {index}: dies; what it kept is damaged", damaged

    def _restart_steps(self, state: State, index: int, node: Node) -> Iterator[Step]:
        """The node looks at etcd and at its store before it comes back."""
        head = state.log[-1]
        config = self.configs[head.config]
        if self._is_removed(state, index, head.config):
            return
        here = 1 << index
        keep = self._bit(head.named) | self._bit(head.pin)
        if self.rules.restart_keeps_pending:
            keep |= head.sessions
        if not self._members[head.config] & here and not self.bounds.leftovers:
            keep = self._bit(head.pin)
        sealed = node.sealed & keep
        changed: GroupConfig | None = None
        lost = state.lost
        if node.mode == DAMAGED and index in config.members:
            missing = self._bit(head.named) & ~sealed
            if index in config.in_sync and missing and self.rules.restart_verifies:
                if len(config.in_sync) > 1:
                    changed = groups.demoted(config, index)
                else:
                    lost |= missing
            if changed is None and self.rules.restart_refences:
                changed = groups.refenced(config)
        if changed is not None and config.epoch >= self.bounds.epochs:
            return
        after = state._replace(lost=lost)
        said = ""
        if changed is not None:
            after = self._put(after, head._replace(config=self.number(changed)))
            said = f": {self.show(self.number(changed))}"
        up = Node(UP, len(after.log) - 1, sealed, 0)
        yield f"node {index}: comes back{said}", self._with_node(after, index, up)

    def _expiry_steps(self, state: State) -> Iterator[Step]:
        if not self.may(state, EXPIRY):
            return
        head = state.log[-1]
        for index, writer in enumerate(state.writers):
            bit = 1 << writer.content
            if not head.sessions & bit:
                continue
            after = self._put(state, head._replace(sessions=head.sessions & ~bit))
            yield f"etcd: the session of writer {index} ends", after._replace(left=state.left - 1)

    def _pin_steps(self, state: State) -> Iterator[Step]:
        head = state.log[-1]
        if head.pin != NOTHING:
            after = self._put(state, head._replace(pin=NOTHING))
            yield f"reader: unpins content {head.pin}", after._replace(owed=0)
            return
        if not self.may(state, PIN):
            return
        for content in {etcd.named for etcd in state.log} - {NOTHING}:
            if content != head.named and self.rules.pin_compares_version:
                continue
            if state.lost >> content & 1:
                continue
            owed = 0
            for node in self.configs[head.config].in_sync:
                if state.nodes[node].mode in (UP, DOWN):
                    owed |= 1 << node
            after = self._put(state, head._replace(pin=content))
            yield f"reader: pins content {content}", after._replace(owed=owed, left=state.left - 1)

    # --- small parts

    def _bit(self, content: int) -> int:
        return 0 if content == NOTHING else 1 << content

    def _with_node(self, state: State, index: int, node: Node) -> State:
        # As state._replace does, in half the time: this is most of what the explorer does.
        return State(state.log, with_item(state.nodes, index, node), *state[2:])

    def _keeping(self, state: State, index: int, sealed: int, torn: int | None = None) -> State:
        """Return the state in which a node keeps these contents, and receives those, as before if None."""
        mode, view, _, receiving = state.nodes[index]
        return self._with_node(
            state, index, Node(mode, view, sealed, receiving if torn is None else torn)
        )

    def _with_writer(self, state: State, index: int, writer: Writer) -> State:
        return State(state.log, state.nodes, with_item(state.writers, index, writer), *state[3:])

    def _with_put(self, state: State, content: int, config: int) -> State:
        return state._replace(puts=state.puts | {(content, config)})

    def _put(self, state: State, etcd: Etcd) -> State:
        return State((*state.log, etcd), *state[1:])

    def show(self, config: int) -> str:
        return self._shown[config]

    # --- what must hold

    def check(self, state: State) -> None:
        head = state.log[-1]
        named = self._bit(head.named) & ~state.lost
        in_sync = self._in_sync[head.config]
        for index, node in enumerate(state.nodes):
            if node.mode not in (UP, DOWN):
                continue
            if named & ~node.sealed and in_sync >> index & 1:
                raise Broken(
                    f"node {index} is in sync and lacks content {head.named}, the current one"
                )
            if head.pin != NOTHING and state.owed >> index & 1 and not node.sealed >> head.pin & 1:
                raise Broken(f"node {index} freed content {head.pin}, which a reader has pinned")
            if node.mode == UP and node.view == len(state.log) - 1:
                allowed = named | state.lost | self._bit(head.pin)
                if self._members[head.config] >> index & 1 or self.bounds.leftovers:
                    allowed |= head.sessions
                if node.sealed & ~allowed:
                    raise Broken(f"node {index} keeps what nobody will ever need: {node}")

    def canonical(self, state: State) -> State:
        """The two writers can stand for each other. Most often they tell which state it is."""
        if len(state.writers) < 2:
            return state
        first, second = state.writers[0], self._as_other(state.writers[1])
        if first == second:
            return min(state, self.swapped(state), key=hash)
        return state if first < second else self.swapped(state)

    def _check_commit(self, state: State, head: Etcd, content: int) -> None:
        for index, node in enumerate(state.nodes):
            is_member = self._members[head.config] >> index & 1
            if is_member and node.mode in (UP, DOWN) and not node.sealed >> content & 1:
                raise Broken(f"content {content} is committed, and member {index} lacks it")

    def wider(self, state: State) -> Iterator[State]:
        """Yield the same, but with more events that may still happen."""
        for left in range(state.left + 1, self.bounds.events + 1):
            yield State(*state[:-1], left)

    def reduced(self, state: State) -> State:
        """Without what no step looks at any more."""
        before = state.log, state.nodes
        removed = 0
        if (REMOVED, state.log[-1].config) in state.promotions:
            # These follow etcd only until they learn of it.
            removed = self._in_sync[state.log[-1].config]
        after = self._moved.get((before, removed))
        if after is None:
            after = self._moved[before, removed] = self._as_moved(*before, removed)
        log, nodes = after
        promotions = state.promotions
        if promotions:
            promotions = frozenset(sent for sent in promotions if sent[1] == log[-1].config)
        writers = state.writers
        puts = state.puts
        if puts:
            puts = self._awaited(puts, log, nodes, writers)
        if self._eager:
            writers = self._as_committing(writers, log[-1])
        if (
            after == before
            and writers == state.writers
            and len(puts) == len(state.puts)
            and len(promotions) == len(state.promotions)
        ):
            return state
        return State(log, nodes, writers, puts, promotions, state.owed, state.lost, state.left)

    def _as_committing(self, writers: tuple[Writer, ...], head: Etcd) -> tuple[Writer, ...]:
        """Return the writers, without the acknowledgements by which none can commit any more: neither a
        session nor a configuration comes back, and a writer that gave up gets no more of them."""
        for index, (phase, content, config, acks) in enumerate(writers):
            if config == NOTHING:
                continue
            over = not head.sessions >> content & 1
            if phase == GAVE_UP and (
                over or config != head.config or self._members[config] & ~acks
            ):
                writer = Writer(GAVE_UP, content, NOTHING, 0)
            elif phase == SENDING and over and acks:
                writer = Writer(SENDING, content, config, 0)
            else:
                continue
            writers = (*writers[:index], writer, *writers[index + 1 :])
        return writers

    def _as_moved(self, log: tuple[Etcd, ...], nodes: tuple[Node, ...], removed: int) -> Seen:
        """Return the log and the nodes, each node as far as it gets without doing anything."""
        head = len(log) - 1
        oldest = head
        last = log[-1]
        keep = last.sessions | self._bit(last.named) | self._bit(last.pin)
        moved = list(nodes)
        for index, node in enumerate(nodes):
            if node.mode != UP:
                if self._eager and node.sealed & ~keep:
                    moved[index] = Node(node.mode, NOTHING, node.sealed & keep, 0)
                continue
            while self._eager and node.view < head and not removed >> index & 1:
                old, new = log[node.view : node.view + 2]
                after = self._followed(index, node, old, new)
                if not self._may_hurry(1 << index, node, old, new, after):
                    break
                node = after
            moved[index] = node
            oldest = min(oldest, node.view)
        if oldest:
            log = log[oldest:]
            moved = [
                Node(UP, node.view - oldest, node.sealed, node.torn) if node.mode == UP else node
                for node in moved
            ]
        return log, tuple(moved)

    def _may_hurry(self, here: int, node: Node, old: Etcd, new: Etcd, after: Node) -> bool:
        """Return whether a node follows a revision at once, as no harm can come of its waiting alone.

        A member of the old and the new configuration need not wait: data that it would take under the old
        one could have come before the new one was put, for nothing of that looks at the new one. Neither
        need a node that joins and has nothing, nor one outside that frees nothing: they do nothing before.
        Under one configuration a member loses data that cannot be named or pinned again, and takes no more
        of a session that is over. It must have something left, for only that can be damaged. A node that
        leaves does wait: others may copy from it."""
        was, is_member = self._members[old.config] & here, self._members[new.config] & here
        is_same = (after.sealed, after.torn) == (node.sealed, node.torn)
        if old.config != new.config:
            if not is_member:
                return not was and is_same
            return bool(was) or not (node.sealed & ~self._bit(old.pin) or node.torn)
        if not was:
            return is_same and (old.pin == new.pin or not node.sealed)
        if after.sealed:
            return True
        return is_same and old.sessions == new.sessions and bool(self._in_sync[old.config] & here)

    def _awaited(
        self,
        puts: frozenset[Message],
        log: tuple[Etcd, ...],
        nodes: tuple[Node, ...],
        writers: tuple[Writer, ...],
    ) -> frozenset[Message]:
        """The puts that some node may still take, or is taking."""
        if self.bounds.late_puts:
            kept = frozenset(put for put in puts if log[0].sessions >> put[0] & 1)
        else:
            kept = puts & {writer[1:3] for writer in writers if writer.phase == SENDING}
        if kept and self.rules.node_fences_older_configuration:
            known = {etcd.config for etcd in log}
            torn = 0
            for node in nodes:
                torn |= node.torn
            kept = frozenset(put for put in kept if put[1] in known or torn >> put[0] & 1)
        return kept

    def swapped(self, state: State) -> State:
        """The two writers, and their contents, change places."""
        before = state.log, state.nodes
        after = self._swapped.get(before)
        if after is None:
            after = self._swapped[before] = self._as_swapped(*before)
        first, second = state.writers
        return State(
            *after,
            (self._as_other(second), self._as_other(first)),
            frozenset((self._other(content), config) for content, config in state.puts),
            state.promotions,
            state.owed,
            self._others(state.lost),
            state.left,
        )

    def _as_swapped(self, log: tuple[Etcd, ...], nodes: tuple[Node, ...]) -> Seen:
        other, others = self._other, self._others
        return (
            tuple(Etcd(e.config, other(e.named), others(e.sessions), other(e.pin)) for e in log),
            tuple(Node(n.mode, n.view, others(n.sealed), others(n.torn)) for n in nodes),
        )

    def _as_other(self, writer: Writer) -> Writer:
        return Writer(writer.phase, self._other(writer.content), writer.config, writer.acks)

    def _other(self, content: int) -> int:
        """The content of the other writer that has the same place among its contents."""
        size = self.bounds.contents
        return content if content == NOTHING else (content + size) % (2 * size)

    def _others(self, contents: int) -> int:
        """The same for a set of contents."""
        size = self.bounds.contents
        low = (1 << size) - 1
        return contents >> size | (contents & low) << size


# Visited completely in little time.
KEPT = {
    "two writers while the group changes": Bounds(epochs=3, events=0),
    "two writers and any one event": Bounds(epochs=2, events=1),
}
# Together some seconds on one core; each is visited completely.
BOUNDED = {
    "late data, late promotions and any one event": Bounds(
        writers=1, events=1, late_puts=True, late_promotions=True
    ),
    "data arrives slowly, and a node or a session dies": Bounds(
        writers=1, events=1, torn=True, kinds=(CRASH, DAMAGE, EXPIRY)
    ),
    "a node keeps for a while what it had as a member": Bounds(
        writers=1, events=1, leftovers=True, torn=True, kinds=(CRASH, DAMAGE)
    ),
    "a writer with a second session": Bounds(
        writers=1, contents=2, epochs=2, events=2, kinds=(EXPIRY, LOSS), late_puts=True
    ),
}
# Half a minute, together.
LARGE = {
    "two writers, changes and any one event": Bounds(epochs=3, events=1),
    "the members in sync are given up after a change": Bounds(
        writers=1, epochs=4, events=2, kinds=(CRASH, REMOVAL)
    ),
    "any two events, of which one may be that the members in sync are given up": Bounds(
        writers=1, epochs=3, events=2, kinds=(*EVENTS, REMOVAL), late_puts=True
    ),
    "the members in sync are given up under two writers": Bounds(
        epochs=3, events=2, kinds=(CRASH, REMOVAL)
    ),
    "a member leaves, comes back and leaves": Bounds(writers=1, epochs=4, events=1),
}
# The bounds within which each rule is needed.
NEEDED = {
    "commit_compares_configuration": Bounds(writers=1, events=0),
    "commit_compares_session": Bounds(writers=1, epochs=1, kinds=(EXPIRY,)),
    "writer_includes_joining": Bounds(writers=1, events=0),
    "acknowledgement_is_of_one_configuration": Bounds(writers=1, epochs=3, kinds=(DAMAGE,)),
    "abort_only_when_not_committing": Bounds(writers=1, epochs=1, kinds=(ABORT,)),
    "node_waits_for_newer_configuration": Bounds(writers=1, epochs=3, events=0),
    "node_serves_only_sealed": Bounds(writers=1, events=0, torn=True),
    "change_compares_configuration": Bounds(writers=1, events=0),
    "last_in_sync_stays": Bounds(writers=1, events=0),
    "promotion_compares_contents": Bounds(writers=1, events=0),
    "promotion_looks_at_its_own_revision": Bounds(writers=1, events=0),
    "restart_verifies": Bounds(writers=1, kinds=(DAMAGE,)),
    "restart_refences": Bounds(writers=1, kinds=(DAMAGE,)),
    "restart_keeps_pending": Bounds(writers=1, kinds=(CRASH,)),
    "pending_lives_with_its_session": Bounds(writers=1, events=0),
    "old_version_stays_until_superseded": Bounds(epochs=1, events=0),
    "pin_compares_version": Bounds(epochs=1, kinds=(PIN,)),
    "pinned_stays": Bounds(epochs=1, kinds=(PIN,)),
    "group_is_fenced_before_it_is_emptied": Bounds(writers=1, events=2, kinds=(CRASH, REMOVAL)),
    "group_is_emptied_when_nothing_is_named": Bounds(writers=1, kinds=(REMOVAL,)),
}
