"""Parsing of model output into reasoning, content and tool calls. Text only, no web."""
