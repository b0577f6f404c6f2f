"""What the scheduler decides about and with: requests, parameters, plans, configuration."""
