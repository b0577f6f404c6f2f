"""Who is next, who may be preempted, and what may share a step."""
