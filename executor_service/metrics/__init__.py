"""What of steps and streams is shown to Prometheus."""
