"""What operators learn of requests, steps and executors: folds over the turns of the scheduler."""
