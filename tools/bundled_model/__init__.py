"""Builds the bundled model: a story grammar, a tokenizer and a training run."""
