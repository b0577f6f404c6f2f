"""Sends requests when they are due, and notes when what comes has come."""
