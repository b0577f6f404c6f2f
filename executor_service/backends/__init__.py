"""Which code computes on this machine: chosen, and tried against plain torch before it serves."""
