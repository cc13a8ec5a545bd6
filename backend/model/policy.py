"""Placement policies: the meaning of `user.irdmafs.placement` of a directory for the files below it.

The part that decides which nodes may keep a file is its *rule*. Each rule has a number, and groups of its
own (placement.pool_of); the numbers are given out in etcd (records.policy_key), once and for ever.
"""

import errno
from collections.abc import Mapping
from typing import NamedTuple

# Failure domains, widest first.
LEVELS = ("zone", "rack", "host")
POLICIES_MAX = 255
REPLICAS_MAX = 8


class Candidate(NamedTuple):
    """A node that may keep data. Nodes without a label share one domain of that level, except that a
    node without a host label is alone on its host."""

    node: int
    weight: float = 1.0
    labels: Mapping[str, str] = {}


class Policy(NamedTuple):
    """A value of `user.irdmafs.placement`, for files created below the directory.

    `spread` is the widest level at which replicas are kept apart; `only` restricts to nodes whose
    label is one of the values; `local` wants a replica on the writer's host; `together` wants files of
    the same name below the directory in the same groups. The last two need no groups of their own:
    the creator picks a seed that leads to fitting ones.
    """

    spread: str = LEVELS[0]
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()
    local: bool = False
    together: bool = False

    @property
    def levels(self) -> tuple[str, ...]:
        return LEVELS[LEVELS.index(self.spread) :]

    @property
    def rule(self) -> str:
        """Return the part that decides which groups are used, in canonical form; "" is the default."""
        terms = [f"{level}={'|'.join(values)}" for level, values in self.only]
        if self.spread != LEVELS[0]:
            terms.append(f"spread={self.spread}")
        return " ".join(terms)

    def admits(self, candidate: Candidate) -> bool:
        return all(candidate.labels.get(level) in values for level, values in self.only)


# It admits no node.
NOT_UNDERSTOOD = Policy(only=((LEVELS[0], ()),))


def parse_policy(text: str) -> Policy:
    """Parse words separated by blanks or commas: `zone=a|b`, `rack=…`, `host=…`, `spread=zone|rack|host`,
    `local` or `together`.

    Raises ValueError with a line that says what is allowed.
    """
    spread, local, together = LEVELS[0], False, False
    only: dict[str, tuple[str, ...]] = {}
    seen = set()
    for word in text.replace(",", " ").split():
        key, equals, value = word.partition("=")
        if key in seen:
            raise ValueError(f"placement: {key!r} is said twice")
        seen.add(key)
        if word == "local":
            local = True
        elif word == "together":
            together = True
        elif key == "spread" and value in LEVELS:
            spread = value
        elif key in LEVELS and equals and all(value.split("|")):
            only[key] = tuple(sorted(set(value.split("|"))))
        else:
            raise ValueError(
                f"placement: {word!r} is not understood; write words like zone=a, rack=r1|r2, "
                f"spread={'|'.join(LEVELS)}, local, together"
            )
    if local and together:
        raise ValueError(
            "placement: local and together exclude each other: the groups of a file follow from its "
            "writer's host, or from its name"
        )
    only_in_order = tuple((level, only[level]) for level in LEVELS if level in only)
    return Policy(spread, only_in_order, local, together)


def policy_of_rule(rule: str) -> Policy:
    """Return the policy of a rule that is in etcd; NOT_UNDERSTOOD if it is of a newer version."""
    try:
        return parse_policy(rule)
    except ValueError:
        return NOT_UNDERSTOOD


def policy_id(rule: str, known: Mapping[int, str], *, is_root: bool = True) -> int:
    """Return the number of a rule: 0 for the default, else its known one, else the lowest free one, to be
    put (records.policy_key) by a transaction that compares its absence. Raises ENOSPC."""
    if not rule:
        return 0
    for number, text in known.items():
        if text == rule:
            return number
    most = POLICIES_MAX if is_root else POLICIES_MAX // 2
    for number in range(1, most + 1):
        if number not in known:
            return number
    raise OSError(errno.ENOSPC, f"placement: more than {most} different rules")
