"""A worker process with a vLLM replica whose weights are updated, driven from the tests' process."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from replica_processes import replica_process

from enginehouse.controller import WorkerGroup

SECONDS = 300.0
"""Longest any call may take, an engine's launch included."""


@dataclass(frozen=True)
class Acts:
    """Runs acts of `vllm_weight_acts` on a replica; `url` is for its OpenAI clients."""

    group: WorkerGroup
    url: str | None

    def __call__(self, name: str, *args: Any) -> Any:
        return self.group.call("act", name, *args)[0]


@contextlib.contextmanager
def updated_replica(
    runtime: Any, path: str, dtype: str = "float32", env: dict[str, str] | None = None, **options: Any
) -> Iterator[Acts]:
    """A replica of the model at `path`."""
    from vllm_weight_acts import UpdatedReplica

    with replica_process(UpdatedReplica, runtime, "vllm", SECONDS, **(env or {})) as group:
        yield Acts(group, group.call("launch", path, dtype, **options)[0])


def close_to(logprobs: Sequence[float], expected: torch.Tensor, tolerance: float = 2e-4) -> bool:
    """Whether logprobs are the expected ones; anything else fails with both."""
    torch.testing.assert_close(torch.tensor(list(logprobs)), expected.float(), atol=tolerance, rtol=0)
    return True
