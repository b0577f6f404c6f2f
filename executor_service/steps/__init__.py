"""Step contract on plain values and numpy: batches, their checks, and their execution."""
