"""The verbs transport beside perftest, TCP and gRPC: registrations, a training loop."""
