"""What environments and policies hand to a buffer, where RLightning has it."""

from expstore.buffer.types import (
    BatchedData,
    EnvMeta,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
    Processed_EnvRet_fields,
)

__all__ = [
    "BatchedData",
    "EnvMeta",
    "EnvRet",
    "MultiAgentEnvRet",
    "MultiAgentPolicyResponse",
    "PolicyResponse",
    "Processed_EnvRet_fields",
]
