"""Load generation: sends requests when they are due, and records when tokens arrive."""
