"""Executors of the scheduler: joining, leaving and loss, sessions, links, and step time limits."""
