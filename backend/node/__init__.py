"""The store node: a process that keeps extents for a cluster (`irdmafs serve`)."""
