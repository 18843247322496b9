"""What an engine must do: the protocols, and the plain data that crosses them.

Options that all backends share are in `enginehouse.engines.options`, apart, because they import pydantic.
"""

from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.rollout import (
    Completion,
    Endpoint,
    GenerateRequest,
    GenerateResult,
    Health,
    RolloutEngine,
    SamplingParams,
)
from enginehouse.engines.train import (
    LossSpec,
    LossValue,
    Max,
    Mean,
    Metrics,
    NonFiniteWeights,
    OffloadsState,
    Outputs,
    SavesInBackground,
    TokenView,
    TrainEngine,
    TrainsAdapters,
    merge_metrics,
)
from enginehouse.engines.weights import (
    HostMemory,
    ParamMeta,
    TransferPlan,
    TransportSession,
    WeightChunk,
    WeightSource,
    WeightState,
    WeightSyncError,
    WeightTransport,
    WeightUpdate,
)

__all__ = [
    "Completion",
    "Endpoint",
    "GenerateRequest",
    "GenerateResult",
    "Health",
    "HostMemory",
    "LossSpec",
    "LossValue",
    "Max",
    "Mean",
    "Mesh",
    "Metrics",
    "ModelSpec",
    "NonFiniteWeights",
    "OffloadsState",
    "Outputs",
    "ParamMeta",
    "ProcessContext",
    "RolloutEngine",
    "SamplingParams",
    "SavesInBackground",
    "TokenView",
    "TrainEngine",
    "TrainsAdapters",
    "TransferPlan",
    "TransportSession",
    "WeightChunk",
    "WeightSource",
    "WeightState",
    "WeightSyncError",
    "WeightTransport",
    "WeightUpdate",
    "merge_metrics",
]
