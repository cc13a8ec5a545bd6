"""POSIX operations on names and attributes, and the locks of files."""
