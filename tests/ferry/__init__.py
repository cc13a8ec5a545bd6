"""A small mover for tests: extents go through files in a directory that both ends see."""
