"""What every process can be told, by flags, environment and file: one table of options."""
