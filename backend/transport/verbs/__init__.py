"""RDMA verbs: one-sided READ and WRITE between registered files, past TCP and processors.

    library     pyverbs, if it is installed
    devices     devices of this host, obstacles to their use, and which one leads to a peer
    rails       ports and their networks (networks); which rails of two hosts reach each other
    queue       a reliable connection: work requests, completions, errors, and rights that a peer has by it
    regions     an opened port, and registered ranges of files, kept for later operations
    staging     registered memory for files that are transferred only once
    rdma        this process's adapters; whether verbs are used at all
    path        the caller's end of a queue pair to a store node
    way         the caller's end: all queue pairs to one node, and which one an operation uses
    serving     the node's end: rights to its memory
    mover       what this process offers and asks for; messages: its messages on control connections

Only `library` imports pyverbs, and only when `rdma` found a device.
"""
