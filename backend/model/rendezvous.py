"""Weighted rendezvous hashing with quotas: the nodes of each group. Arrays only, no names.

A group wants the nodes with the highest scores -w / ln(h), h in (0, 1) a hash of (group, node): weighted
rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998; the
weights: Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005, the logarithmic
method). Chance alone would load a node 10 % above the mean with 1024 groups. So each node has a quota,
its share rounded up or down; a full node refuses the groups that score lowest there, and they turn to
their next choice: deferred acceptance (Gale and Shapley, 1962). The outcome depends on no order. A group
prefers the nodes that it is on already: a group that need not move stays.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .policy import REPLICAS_MAX

# More than any crowding: a node has at most one replica of a group.
_TAKEN = 1 << 40

Ids = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def settle(
    groups: Ids, nodes: Ids, weights: Floats, domains: Sequence[Ints], replicas: int, held: Bools
) -> Ints:
    """Return, for each group, the indices of `replicas` nodes (fewer if there are fewer), best score first.

    `domains` number each node's failure domain, per level, widest first. `held` [group, node] is the
    current placement. Replicas are kept as far apart as possible first; balance comes second.
    """
    scores = _scores(groups, nodes, weights)
    preference = scores + held
    quotas = _quotas(_shares(weights, domains, replicas) * len(groups), held.sum(axis=0))
    count, width = scores.shape
    refused = np.zeros((count, width), dtype=bool)
    forced = np.zeros((count, width), dtype=bool)
    chosen = np.zeros((count, replicas), dtype=np.int64)
    rows = np.arange(count)
    while len(rows):
        picks, against = _choose(preference[rows], refused[rows], domains, replicas)
        chosen[rows] = picks
        # Keeping replicas apart, and their number, come before the balance.
        forced[rows[:, None], picks] |= against
        taken = np.zeros((count, width), dtype=bool)
        taken[np.arange(count)[:, None], chosen] = True
        again = np.zeros(count, dtype=bool)
        for node in np.flatnonzero(taken.sum(axis=0) > quotas):
            holders = np.flatnonzero(taken[:, node] & ~forced[:, node])
            excess = int(taken[:, node].sum() - quotas[node])
            losers = holders[np.argsort(preference[holders, node], kind="stable")[:excess]]
            refused[losers, node] = True
            again[losers] = True
        rows = np.flatnonzero(again)
    best_first = np.argsort(-np.take_along_axis(scores, chosen, axis=1), axis=1, kind="stable")
    return np.take_along_axis(chosen, best_first, axis=1)


def _scores(groups: Ids, nodes: Ids, weights: Floats) -> Floats:
    """Return scores in (0, 1): r / (1 + r) keeps the order of the scores r."""
    mixed = _mix(_mix(groups)[:, None] ^ _mix(nodes + np.uint64(1))[None, :])
    # The upper 53 bits, in the middle of their interval: never 0 or 1.
    unit = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    scores: Floats = -(weights / weights.mean())[None, :] / np.log(unit)
    return scores / (1 + scores)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood, 2014); the arithmetic is modulo 2^64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _shares(weights: Floats, domains: Sequence[Ints], replicas: int) -> Floats:
    """Return how many replicas of one group each node gets on average: by weight, as far as one replica
    per node and even numbers per domain allow."""
    result = np.zeros(len(weights))

    def fill(members: Ints, depth: int, total: float, most: int) -> None:
        if depth == len(domains):
            result[members] = _water(total, weights[members], np.ones(len(members)))
            return
        column = domains[depth][members]
        children = [members[column == number] for number in sorted(set(column.tolist()))]
        sizes = np.array([len(child) for child in children])
        even = next(n for n in range(1, most + 1) if np.minimum(sizes, n).sum() >= most)
        limits = np.minimum(sizes, even)
        shares = np.array([weights[child].sum() for child in children])
        totals = _water(total, shares, limits.astype(np.float64))
        for child, part, limit in zip(children, totals, limits, strict=True):
            fill(child, depth + 1, float(part), int(limit))

    fill(np.arange(len(weights)), 0, float(replicas), replicas)
    return result


def _water(total: float, weights: Floats, limits: Floats) -> Floats:
    """Divide `total` by weight, none above its limit; the remainder goes to the others."""
    result = np.zeros(len(weights))
    is_open = np.ones(len(weights), dtype=bool)
    while is_open.any():
        part = total * weights / weights[is_open].sum()
        full = is_open & (part >= limits)
        if not full.any():
            result[is_open] = part[is_open]
            break
        result[full] = limits[full]
        total -= float(limits[full].sum())
        is_open &= ~full
    return result


def _quotas(shares: Floats, held: Ints) -> Ints:
    """Return whole numbers with the same sum, rounded up where most is held, so as to move least."""
    quotas = np.floor(shares + 1e-9).astype(np.int64)
    left = round(float(shares.sum())) - int(quotas.sum())
    fraction = shares - quotas
    order = np.lexsort((-fraction, -(held - quotas)))
    up = [node for node in order if fraction[node] > 1e-9][:left]
    quotas[up] += 1
    return quotas


def _choose(
    scores: Floats, refused: Bools, domains: Sequence[Ints], replicas: int
) -> tuple[Ints, Bools]:
    """Return, per group, the best nodes, each in the domains that have the fewest of the group's replicas
    so far, the widest level first; and which of them had refused the group."""
    count, width = scores.shape
    every = np.arange(count)
    crowding = np.zeros((count, width), dtype=np.int64)
    picks = np.zeros((count, replicas), dtype=np.int64)
    against = np.zeros((count, replicas), dtype=bool)
    for turn in range(replicas):
        apart = crowding == crowding.min(axis=1, keepdims=True)
        willing = apart & ~refused
        none = ~willing.any(axis=1)
        willing[none] = apart[none]
        pick = np.where(willing, scores, -1.0).argmax(axis=1)
        picks[:, turn] = pick
        against[:, turn] = none
        if turn + 1 == replicas:
            break
        for depth, column in enumerate(domains):
            same = column[None, :] == column[pick][:, None]
            crowding += same.astype(np.int64) * (REPLICAS_MAX + 1) ** (len(domains) - depth)
        crowding[every, pick] += _TAKEN
    return picks, against
