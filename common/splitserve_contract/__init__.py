"""What scheduler, executors and clients agree on: version, domain errors, sampling parameters."""

from splitserve_contract.domain_error import DOMAIN, DomainError
from splitserve_contract.sampling_parameters import (
    DRAW_PARAMETERS,
    EXAMPLES_OF_LIMITS,
    MAX_BEAM_WIDTH,
    MAX_SEQUENCES,
    PARAMETER_OF_NAME,
    PARAMETERS,
    RECOMMENDED_PARAMETERS,
    GivenSamplingValues,
    NumericParameter,
    Range,
    SamplingValues,
)
from splitserve_contract.version import CONTRACT_MAJOR, CONTRACT_MINOR, SAMPLING_VERSION

__all__ = [
    "CONTRACT_MAJOR",
    "CONTRACT_MINOR",
    "DOMAIN",
    "DRAW_PARAMETERS",
    "EXAMPLES_OF_LIMITS",
    "MAX_BEAM_WIDTH",
    "MAX_SEQUENCES",
    "PARAMETERS",
    "PARAMETER_OF_NAME",
    "RECOMMENDED_PARAMETERS",
    "SAMPLING_VERSION",
    "DomainError",
    "GivenSamplingValues",
    "NumericParameter",
    "Range",
    "SamplingValues",
]
