"""Version of the step contract between scheduler and executor."""

CONTRACT_MAJOR = 1
CONTRACT_MINOR = 10
# Version of the arithmetic of SamplingParams: ExecutorInfo.sampling_version.
SAMPLING_VERSION = 2
