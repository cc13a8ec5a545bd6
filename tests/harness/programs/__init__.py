"""Programs that tests run instead of, or beside, the command `irdmafs`."""
