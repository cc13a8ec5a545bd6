"""Stores: the interface that a mount uses, the embedded store, and the store of a cluster (remote)."""
