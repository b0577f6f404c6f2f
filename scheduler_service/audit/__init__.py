"""Audit log: actions and their callers, for accountability; never the content of requests."""
