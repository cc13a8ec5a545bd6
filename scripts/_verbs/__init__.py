"""What `bench_verbs.py` measures: perftest, the store's devices, gRPC, registrations, a training loop."""
