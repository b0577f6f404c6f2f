"""Decoders that replace the `transformers` code of known models, with matrices joined or packed."""
