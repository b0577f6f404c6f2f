"""What may be wrong with a machine, settings and processes: one function for each question."""
