"""Logits to tokens and scores."""
