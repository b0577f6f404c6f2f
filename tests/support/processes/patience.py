"""How long tests wait for what is to happen: as long as a machine may be busy with other things."""

from __future__ import annotations

from splitserve_client import ClientConfig, RetryPolicy

PATIENCE_S = 240.0
# Of clients whose scheduler is killed and started again, and of those who only ask.
PATIENT = ClientConfig(connect_timeout_s=PATIENCE_S, retry=RetryPolicy(give_up_after_s=PATIENCE_S))
PATIENT_AT_CALLS = ClientConfig(connect_timeout_s=PATIENCE_S)
