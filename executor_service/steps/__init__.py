"""The step contract on plain values and numpy: what a batch may say, and what follows from it."""
