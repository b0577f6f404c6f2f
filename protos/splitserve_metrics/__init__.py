"""What processes show to Prometheus: names, instruments, and the address where it reads."""
