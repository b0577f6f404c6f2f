"""Speculation: draft tokens of rows, their acceptance rates, and how many of them pay."""
