"""Fair sharing of bounded resources among tenants: turns, places and shares."""
