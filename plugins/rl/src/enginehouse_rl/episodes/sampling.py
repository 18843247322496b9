"""Sampling parameters of a config, and the seeds of steps and rows."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.train import Outputs
from enginehouse.fleet.generation import row_seeds

if TYPE_CHECKING:
    from enginehouse_rl.config.schema import SamplingConfig


def make_sampling_params(sampling: SamplingConfig, samples_per_prompt: int) -> SamplingParams:
    """Return the engine's sampling parameters for a config."""
    return SamplingParams(
        n=samples_per_prompt,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=tuple(sampling.stop),
    )


def make_sampling_outputs(sampling: SamplingConfig, entropy: bool = False) -> Outputs:
    """Return the outputs to request from a trainer: logprobs, and optionally entropy, at the rollout's temperature."""
    return Outputs(entropy=entropy, temperature=sampling.temperature or 1.0)


def make_step_seed(seed: int, step: int) -> int:
    """Return a 64-bit seed for a step from a run's seed of any size. Neighbouring steps get unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest(), "little")


def make_row_seed(seed: int, row: int) -> int:
    """Return the seed of one row; see `row_seeds`."""
    return row_seeds(seed, np.array([row]))[0]
