"""The scheduler service: owns requests, queues and block tables, decides, computes nothing."""
