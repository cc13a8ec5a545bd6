"""Training through files: workers push, reducers make the next version, workers pull (docs/training.md)."""
