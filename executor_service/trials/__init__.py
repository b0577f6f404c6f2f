"""Trials: comparison of a model, or of a replacement for a part of it, with plain torch."""
