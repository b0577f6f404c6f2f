"""Values of the scheduler: requests, parameters, plans, results, configuration."""
