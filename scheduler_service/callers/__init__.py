"""Who calls, and what that caller may do."""
