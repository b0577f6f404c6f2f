"""What of requests, steps and executors is shown to Prometheus."""
