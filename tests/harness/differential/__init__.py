"""Programs of the differential tests: the same steps on two filesystems, and every answer compared."""
