"""Figures, metrics and log lines of a process."""
