"""The content that each open gets, when it becomes a version, and how long the kernel may believe it."""
