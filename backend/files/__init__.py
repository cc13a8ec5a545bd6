"""Files of a store directory: extents, holes, digests, and what is being received."""
