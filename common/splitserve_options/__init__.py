"""Options of all processes, from flags, environment and a file, declared in one table."""
