"""Changes of an ordered map."""

import random

from irdmafs.backend.kv.map import Map

Change = tuple[bytes, bytes | None]


def change(
    records: Map, changes: list[Change], *, durable: bool = True, urgent: bool = False
) -> None:
    """All or nothing."""
    records.begin(sum(len(value or b"") for _, value in changes), urgent=urgent)
    try:
        for key, value in changes:
            records.put(key, value)
        if durable:
            records.commit()
    except OSError:
        records.undo()
        raise


def transaction_of(seed: int, number: int) -> tuple[list[Change], bool]:
    """Return the changes of one transaction of the run `seed`, and whether it is durable."""
    chance = random.Random(seed * 1_000_003 + number)
    changes: list[Change] = [(b"newest", b"%d" % number)]
    for key in chance.sample(range(50), chance.randint(1, 6)):
        size = chance.choice([3, 200, 9000])
        changes.append((b"k%d" % key, None if chance.random() < 0.3 else chance.randbytes(size)))
    return changes, chance.random() < 0.2
