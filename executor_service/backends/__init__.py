"""Choice of the code that computes a model, and the trials that each candidate must pass."""
