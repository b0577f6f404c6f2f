"""Checks of a machine, of settings and of processes: one function per question."""
