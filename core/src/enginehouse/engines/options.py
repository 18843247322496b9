"""Options that all engines of a kind share. The options class of an engine derives from one of these.

The module has few imports, because the config checks options before any engine is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from enginehouse.engines.memory import MemoryDemand, MemoryUse
from enginehouse.engines.model import Device, ModelSpec
from enginehouse.errors import ConfigError

__all__ = [
    "EngineOptions",
    "GroupedTrainOptions",
    "LoraOptions",
    "RolloutOptions",
    "SplitRolloutOptions",
    "TrainOptions",
    "check_divides",
]


def check_divides(option: str, wanted: int, count: int, what: str) -> None:
    """Check that the value of a layout option divides a number.

    Args:
        option: names of the engine and the option, such as `"fsdp: tensor_parallel"`.
        wanted: value of the option, at least 1.
        count: the number to divide.
        what: description of `count` for the message.

    Raises:
        ConfigError: if `wanted` does not divide `count`. The message names the nearest divisor; of two, the larger.
    """
    if count % wanted:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        nearest = min(divisors, key=lambda n: (abs(n - wanted), -n))
        raise ConfigError(
            f"{option}={wanted} does not divide {what}; nearest divisor: {option.rpartition(' ')[2]}={nearest}"
        )


def check_native(native: Mapping[str, Any], ours: Mapping[str, str], backend: str) -> None:
    """Check that a user sets no engine argument that the backend sets.

    Args:
        ours: arguments that the backend sets, with underscores, each with the setting to use instead, or the reason why
            there is none.

    Raises:
        ValueError: if the backend sets an argument of `native`.
    """
    for name in native:
        if instead := ours.get(name.replace("-", "_")):
            raise ValueError(f"{name!r} is set by the {backend} backend: {instead}")


class EngineOptions(BaseModel):
    """Options of all engines.

    `plan` calls the methods before any process starts. An engine overrides the methods that it needs. Only
    `check_files` may import the engine's libraries.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True)

    native_sources: ClassVar[tuple[str, ...]] = ()
    """Files that declare the arguments in `native`, as fields of classes or as flags.

    Each is a glob pattern relative to a directory of packages, such as `"vllm/engine/arg_utils.py"`. If the engine is
    installed, `plan` reads the files without an import, and rejects arguments that the files do not declare. If there
    are no patterns, no argument is checked.
    """

    native: dict[str, Any] = Field(
        default_factory=dict, description="Arguments passed unchanged to the engine itself, by name"
    )

    @field_validator("native")
    @classmethod
    def _names(cls, native: dict[str, Any]) -> dict[str, Any]:
        for name in native:
            if not name.replace("-", "_").isidentifier():  # YAML reads `{a:1}` as one key without a value
                raise ValueError(f"{name!r} is not the name of an argument; write {{name: value}}, with a space")
        return native

    def check(self, processes: int) -> None:
        """Check the options against each other and the number of processes.

        Args:
            processes: number of processes of the role, `actor.processes` or `rollout.replicas`.

        Raises:
            ConfigError: if they do not fit. The message begins with the option and names values that fit.
        """

    def check_model(self, config: Mapping[str, Any]) -> None:
        """Check the options against a model's `config.json`. The engine checks everything else.

        Args:
            config: the decoder's part of the checkpoint's `config.json` (`text_config` if the model has more than a
                decoder), unchanged. Missing keys have the defaults of the model's class.

        Raises:
            UserError: if they do not fit. The message names the option or the model, and values that fit.
        """

    def check_files(self, model: ModelSpec) -> Sequence[str]:
        """Check the options against a model's files. The check may build the model's class without weights.

        `plan` ignores an `ImportError`, because the engine's libraries may be missing in the process that plans.

        Args:
            model: the model that the engine will get.

        Returns:
            Sentences for the user about unexpected properties.

        Raises:
            UserError: if the engine cannot train or serve the model. The message says why.
        """
        return ()

    def for_device(self, device: Device) -> Self:
        """Fill in unset options that depend on the device. Every engine also calls this method in its setup.

        Args:
            device: torch device type of the run.
        """
        return self

    def check_device(self, device: Device, dtype: str) -> None:
        """Check the options against the device and dtype of a run.

        Args:
            device: torch device type of the run.
            dtype: `ModelSpec.dtype`, such as `"bfloat16"`.

        Raises:
            UserError: if they do not fit. The message begins with the option and names values that fit.
        """

    def memory(self, demand: MemoryDemand) -> MemoryUse | None:
        """Estimate the memory of one rank, or of one replica of a rollout engine. None if unknown.

        Args:
            demand: the work that the engine will do.
        """
        return None

    def servers(self) -> Sequence[str]:
        """Return the URLs of running engines to use instead of new ones. The workers then need no engine.

        No two roles may share a running engine, because each role has its own weights.
        """
        return ()

    def surprises(self) -> Sequence[str]:
        """Return sentences for `plan` about effects of the options that a user may not expect."""
        return ()


class TrainOptions(EngineOptions):
    """Options of all training engines, which use AdamW (Loshchilov & Hutter 2019) with warm-up and a schedule."""

    lr: float = Field(1e-6, gt=0, description="Learning rate after the warm-up")
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0, description="AdamW's term that is added to the denominator")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    max_grad_norm: float = Field(
        1.0,
        gt=0,
        description="Largest gradient norm; larger gradients are scaled down to it. .inf: no gradient is scaled.",
    )
    warmup_steps: int = Field(
        0, ge=0, description="Number of optimizer steps over which the learning rate rises linearly from 0"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Form of the learning rate's decay after the warm-up"
    )
    total_steps: int | None = Field(
        None, gt=0, description="Number of optimizer steps at which the decay ends. Unset: all steps of the run."
    )
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Learning rate at the end of the decay, as a fraction of lr"
    )
    tokens_per_microbatch: int = Field(
        16384, gt=0, description="Maximum number of tokens, padding included, in one forward and backward pass"
    )


class GroupedTrainOptions(TrainOptions):
    """Options of training engines that support separate learning rates for groups of parameters."""

    lr_groups: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="Factors of lr by pattern of parameter names, such as {'*.embed_tokens.*': 0.1}. The first "
        "pattern that matches counts. 0: the parameter is not trained, and its gradient is not part of the norm.",
    )


class LoraOptions(BaseModel):
    """Low-rank adapters (Hu et al. 2021, equation 3): `W + alpha / rank * B @ A`, of which only A and B are trained.

    An engine with the capability `lora` has an options field `lora: LoraOptions | None = None`. B starts at zero, so
    the adapted model starts equal to the original. A is initialised with `ModelSpec.seed`, equally for every number of
    ranks.
    """

    model_config = ConfigDict(extra="forbid")

    rank: int = Field(16, gt=0, description="Rank of the adapters")
    alpha: float = Field(32.0, gt=0, description="Scale of the adapters: their product is multiplied by alpha / rank")
    targets: list[str] | Literal["all-linear"] = Field(
        "all-linear",
        description="Names of the linear layers to adapt, such as q_proj. all-linear: all but the output layer.",
    )


def adapts_output(adapter: LoraOptions) -> bool:
    """Return True if the targets of an adapter name the output layer."""
    return adapter.targets != "all-linear" and any(name.rpartition(".")[2] == "lm_head" for name in adapter.targets)


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return True if the `config.json` of a decoder is that of a mixture of experts."""
    return any("expert" in name and bool(value) for name, value in config.items())


class RolloutOptions(EngineOptions):
    """Options of all rollout engines."""

    max_model_tokens: int | None = Field(
        None,
        gt=0,
        description="Maximum sequence length in tokens, prompt and response together. Unset: the model's own limit.",
    )
    max_running: int = Field(1024, gt=0, description="Maximum number of completions generated at once")

    def gpus(self) -> int:
        """Return the number of GPUs that a replica needs in a run on GPUs; 0 if it uses running servers."""
        return 0 if self.servers() else 1

    def quantizes(self) -> bool:
        """Return True if the engine serves weights in fewer bits than it is sent. Larger differences of logprobs are
        then accepted."""
        return False

    def check_sampling(self, top_p: float, top_k: int, device: str, variables: Mapping[str, str]) -> None:
        """Check the options against the sampling parameters, which some engines cannot apply on every device.

        Args:
            top_p: as in `SamplingParams`; 1 does not truncate.
            top_k: as in `SamplingParams`; 0 does not truncate.
            device: torch device type of the run.
            variables: environment variables of the engine's processes, as far as known.

        Raises:
            ConfigError: if they do not fit. The message names values that fit.
        """

    def check_adapter(self, adapter: LoraOptions, config: Mapping[str, Any], device: Device, dtype: str) -> None:
        """Check that an engine with the capability `adapter_updates` can add an adapter to a model.

        Args:
            config: as in `check_model`.
            device, dtype: as in `check_device`.

        Raises:
            ConfigError: if it cannot. The message is a clause that says why, such as "its rank is above 512".
        """

    def refuse_adapter(self, model: ModelSpec, device: Device) -> None:
        """Check a model with an adapter when an engine is launched, as `check_adapter` does.

        Raises:
            ConfigError: if the engine cannot add the adapter to the model.
        """
        if model.adapter is None:
            return
        config = json.loads(Path(model.path, "config.json").read_text())
        try:
            self.check_adapter(model.adapter, config.get("text_config") or config, device, model.dtype)
        except ConfigError as error:
            raise ConfigError(f"the engine cannot add the adapter to {model.path!r}: {error}") from error


class SplitRolloutOptions(RolloutOptions):
    """Options of rollout engines that can split a replica's model over processes."""

    tensor_parallel: int = Field(1, gt=0, description="Number of processes over which a replica's model is split")

    def gpus(self) -> int:
        """Return the number of GPUs that a replica needs: one for each process, or 0 if it uses running servers."""
        return 0 if self.servers() else self.tensor_parallel

    def check_model(self, config: Mapping[str, Any]) -> None:
        """Check that the number of a replica's processes divides the number of attention heads; see `EngineOptions`."""
        if heads := config.get("num_attention_heads"):
            check_divides("tensor_parallel", self.tensor_parallel, heads, f"the model's {heads} attention heads")
