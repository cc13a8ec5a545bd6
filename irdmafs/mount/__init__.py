"""A mount as a process: its configuration, store directory, mountpoint and daemon."""
