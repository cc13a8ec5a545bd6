"""The cluster: configuration, membership, placement of data, and its state in etcd."""
