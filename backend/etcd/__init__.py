"""A client of etcd's v3 API: gRPC spoken over trio.

`http2` knows calls and their bytes, `connection` the socket, `client` endpoints, credentials and retries,
`etcd_pb2` the messages. Why not grpcio: it answers calls in threads of its own, which costs two thread
switches (*measured* against etcd on loopback: 0.95 ms a put and 0.5 ms of processor time, instead of 0.43
and 0.17), does not survive a fork, and does not distinguish a request that was never sent from one whose
answer was lost.
"""
