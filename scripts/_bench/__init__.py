"""What the measuring scripts share: places to measure, what to measure, and how to print it."""
