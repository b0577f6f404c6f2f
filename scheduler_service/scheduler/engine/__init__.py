"""Engine: the state of one executor (rows, blocks, steps in flight), planning and results."""
