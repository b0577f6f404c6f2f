"""The version of the step contract that both services speak."""

CONTRACT_MAJOR = 1
CONTRACT_MINOR = 4
