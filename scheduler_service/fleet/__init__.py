"""All executors together: who waits, and who gets whom. Pure: no I/O, no clock."""
