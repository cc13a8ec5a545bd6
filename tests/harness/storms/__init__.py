"""What storms do, harm and check: workers, faults and histories."""
