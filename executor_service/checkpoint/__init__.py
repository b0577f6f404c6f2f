"""Checkpoints: checks of their files and configuration, and loading of models and tokenizers."""
