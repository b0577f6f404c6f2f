"""What scheduler, executors and clients agree on: version, domain errors, sampling parameters."""
