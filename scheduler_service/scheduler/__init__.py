"""Pure scheduler of all executors: events and the time go in, effects come out."""
