"""What clients, executors and operators call."""
