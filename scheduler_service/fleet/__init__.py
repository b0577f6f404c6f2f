"""Which of the executors gets which request, and when."""
