"""Sampling on a GPU as a chain of launches: logits to token ids without waiting on the host."""
