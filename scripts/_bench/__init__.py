"""The measurements of `scripts/bench`."""
