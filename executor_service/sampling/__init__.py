"""Sampling: from logits to tokens and scores."""
