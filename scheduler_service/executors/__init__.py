"""The executors as the scheduler has them: who joins, the loop of each and the call to it."""
