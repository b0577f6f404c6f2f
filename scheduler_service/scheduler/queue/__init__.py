"""Waiting queue: the requests that no engine has, in the order of a queue policy."""
