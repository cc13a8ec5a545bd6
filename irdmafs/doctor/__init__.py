"""The doctor: checks of this machine, its RDMA devices, and a cluster's certificates."""
