"""How kernel requests reach the operations: two sessions that serve the same object."""
