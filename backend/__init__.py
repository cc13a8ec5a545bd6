"""The store behind the mount: namespace, extents and the key-value engine under them."""
