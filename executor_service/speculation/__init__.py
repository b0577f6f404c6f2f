"""Guesses of what rows will sample, and steps that verify several of them in one pass."""
