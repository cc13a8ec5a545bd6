"""The processes that make requests: who they are, and what they may do."""
