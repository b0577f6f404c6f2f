"""The scheduler core: a deterministic state machine without I/O, clock, threads or torch."""
