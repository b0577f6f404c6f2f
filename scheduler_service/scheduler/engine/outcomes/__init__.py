"""Outcomes of steps: checks of results, new tokens, and losses after failures."""
