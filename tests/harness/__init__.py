"""A whole cluster on one machine: hosts as network namespaces, etcd, store nodes and mounts."""
