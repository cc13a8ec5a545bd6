"""The parts of the namespace: the tree, what decides its changes, and what commits them."""
