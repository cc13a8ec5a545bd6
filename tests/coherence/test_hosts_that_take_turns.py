"""Two hosts that take turns see one filesystem, close-to-open: they do together what a tmpfs does.

harness/differential/hosts.py says what a turn is. The long run is
`python tests/harness/differential/command.py --session hosts`.
"""

from harness.differential.command import Pair, compare, mounts_of, tmpfs_directory
from harness.differential.hosts import LEFT_OUT
from harness.differential.steps import Vocabulary

STEPS = 500


def test_two_hosts_that_take_turns_do_what_a_tmpfs_does() -> None:
    with (
        mounts_of("hosts", ()) as (mounts, leniency),
        tmpfs_directory() as tmpfs,
        Pair(mounts, tmpfs, leniency, times=False) as pair,
    ):
        compare(pair, Vocabulary(LEFT_OUT), 3, STEPS)
