"""Random tests: each prints the seed with which IRDMAFS_SEED repeats it."""

import os
import random


def chosen_seed() -> int:
    """The seed that IRDMAFS_SEED names, otherwise a random one."""
    seed = int(os.environ.get("IRDMAFS_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"\nIRDMAFS_SEED={seed}")
    return seed


def seeded() -> random.Random:
    """A source of random numbers with that seed."""
    return random.Random(chosen_seed())
