"""A cluster's store as a mount uses it: contents are fetched to this host, and published from here."""
