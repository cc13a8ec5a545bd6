"""The `irdmafs` command: one module for each group of subcommands."""
