"""Identity of callers, and the limits of their tenants."""
