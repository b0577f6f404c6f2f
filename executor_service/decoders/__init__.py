"""Decoders of our own that take a model's place, for the models that they are known to compute."""
