"""The version of the step contract that both services speak."""

CONTRACT_MAJOR = 1
CONTRACT_MINOR = 5
# Of the arithmetic of SamplingParams: ExecutorInfo.sampling_version.
SAMPLING_VERSION = 2
