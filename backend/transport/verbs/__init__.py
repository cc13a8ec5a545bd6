"""Parameters by RDMA verbs: one-sided READ and WRITE between registered files, past TCP and processors.

    library     pyverbs, if it is there
    devices     what this host has, what is in its way, and which one leads to a peer
    rails       ports and the networks that they are on; which of two hosts reach each other (networks)
    opened      an opened port
    adapter     the same with what its queue pairs share
    queue       one reliable connection: work requests, completions, what went wrong
    regions     registered ranges of files, kept for as long as they are of use
    windows     the right to touch one range, for one peer and one operation
    rdma        this process's adapters; whether verbs are used at all
    path        the caller's end of a queue pair to a store node
    lanes       all of them to one node: which one is taken, and what is done when one breaks
    responder   the node's end of one control connection
    mover, way, serving   all this as a mover; messages: what is said on control connections

Only `library` imports pyverbs, and only when `rdma` found a device.
"""
