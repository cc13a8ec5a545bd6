"""A User-Mode Linux guest with RDMA in software, for machines whose kernel has none."""
