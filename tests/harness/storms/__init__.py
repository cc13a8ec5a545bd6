"""Storms: workers, the faults that disturb them, and the histories by which they are checked."""
