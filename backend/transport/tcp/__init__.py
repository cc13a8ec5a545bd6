"""Data connections: threads read and write parameters on them with plain system calls.

mover           what this process offers and asks for
way             the caller's end: extents sent and received on several connections
serving         the node's end: data connections come in, of peers that have a control connection
data            requests on them: extents that go out, or come in and go on to the next node
wire            the format of data connections, and the messages that ask for them
authentication  codes that only the two ends that have the key can write
channel         one data connection as a thread uses it
streams         files sent and received on it
threads         threads, and the event loop that waits for them
"""
