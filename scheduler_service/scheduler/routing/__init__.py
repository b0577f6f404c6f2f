"""Which executor begins a request: the one where it has its first token soonest."""
