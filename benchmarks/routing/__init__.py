"""Routing compared on traces, in virtual time, and what a decision costs."""
