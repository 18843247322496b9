"""Options every backend of a kind shares. A backend's own options class derives from one of these.

Light to import: the config checks options before any engine is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """See that a layout's option divides a number.

    Args:
        option: its name, after the backend's: `"fsdp: tensor_parallel"`.
        wanted: its value, at least 1.
        count: what it has to divide.
        what: `count` in words.

    Raises:
        ConfigError: it does not; the message names the nearest value that does, the larger of two.
    """
    if count % wanted:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        nearest = min(divisors, key=lambda n: (abs(n - wanted), -n))
        raise ConfigError(
            f"{option}={wanted} does not divide {what}; nearest that does: {option.rpartition(' ')[2]}={nearest}"
        )


def check_native(native: Mapping[str, Any], ours: Mapping[str, str], backend: str) -> None:
    """See that a user sets no argument of an engine that its backend sets.

    Args:
        native: what the user set.
        ours: what the backend sets, and what decides each; with underscores, as Python calls it.
        backend: its name.

    Raises:
        ValueError: an argument is the backend's.
    """
    for name in native:
        if decides := ours.get(name.replace("-", "_")):
            raise ValueError(f"{name!r} is set by the {backend} backend; what decides it is {decides}")


class EngineOptions(BaseModel):
    """What all engines take."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    native_sources: ClassVar[tuple[str, ...]] = ()
    """Files that declare what `native` may hold, as fields of classes or as flags: patterns below a directory of
    packages, as `"vllm/engine/arg_utils.py"`. `plan` reads them without an import, where the engine is installed, and
    refuses what they do not name. Empty: nothing is checked."""

    native: dict[str, Any] = Field(default_factory=dict, description="Arguments passed to the engine itself, unchanged")

    @field_validator("native")
    @classmethod
    def _names(cls, native: dict[str, Any]) -> dict[str, Any]:
        for name in native:
            if not name.replace("-", "_").isidentifier():  # `{a:1}`, in which YAML sees one key without a value
                raise ValueError(f"{name!r} is not the name of an argument; write {{name: value}}, with a space")
        return native

    def check(self, processes: int) -> None:
        """Check the options against each other and the role's processes; called by `plan`, before any process starts.

        A backend whose options depend on the number of processes overrides it. It imports no engine either.

        Args:
            processes: of the role, `actor.processes` or `rollout.replicas`.

        Raises:
            ConfigError: they do not fit; the message begins with the option and says what would.
        """

    def check_model(self, config: Mapping[str, Any]) -> None:
        """Check the options against a model; called by `plan`, before any process starts.

        A backend whose options depend on the model overrides it. It imports no engine either, so it sees less than the
        engine: what is not here is for the engine to check.

        Args:
            config: what the checkpoint's `config.json` says of the decoder, as it stands there (`text_config`, where
                the model has more than a decoder). Keys may be missing: their defaults are those of the model's class.

        Raises:
            UserError: they do not fit; the message begins with the option, or names the model, and says what would.
        """

    def check_files(self, model: ModelSpec) -> Sequence[str]:
        """Check the options against a model's files, as the engine will read them; called by `plan`, before any process
        starts.

        A backend overrides it that can build the model's class without its weights. Alone of these methods it may
        import what the engine is built on. Where that is not installed in the process that plans, the `ImportError`
        counts as nothing to say.

        Args:
            model: as the engine is given it.

        Returns:
            What a user may not have expected, a sentence each.

        Raises:
            UserError: the engine cannot train or serve such a model; the message says why.
        """
        return ()

    def for_device(self, device: Device) -> Self:
        """The options with what is unset and depends on the device filled in; called by `plan`, and by an engine as it
        is set up.

        A backend with such options overrides it.

        Args:
            device: torch device type of the run.
        """
        return self

    def check_device(self, device: Device, dtype: str) -> None:
        """Check the options against what a run computes on and in; called by `plan`, before any process starts.

        A backend overrides it that cannot compute in each dtype on each device, or has options that some has no kernels
        for. It imports no engine either.

        Args:
            device: torch device type of the run.
            dtype: `ModelSpec.dtype`, as `"bfloat16"`.

        Raises:
            UserError: they do not fit; the message begins with the option and says what would.
        """

    def memory(self, demand: MemoryDemand) -> MemoryUse | None:
        """What a rank of the engine will hold, a replica's where there are several; called by `plan`, before any
        process starts. None: that is not known.

        A backend that knows overrides it. It imports no engine either.

        Args:
            demand: what it is asked to do.
        """
        return None

    def servers(self) -> Sequence[str]:
        """URLs of engines that run already and are used in the place of own ones; the workers then need no engine.

        A backend that can be told to use such engines overrides it. No two roles may use one: each has weights of its
        own.
        """
        return ()

    def surprises(self) -> Sequence[str]:
        """What a user may not have expected of the options, a sentence each; `plan` notes it.

        A backend whose options give something up that others keep overrides it. It imports no engine either.
        """
        return ()


class TrainOptions(EngineOptions):
    """What all training engines take. AdamW (Loshchilov & Hutter 2019) with warm-up and a schedule."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(
        1.0, gt=0, description="Gradients with a larger norm are scaled down to it; .inf: none are"
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after the warm-up")
    total_steps: int | None = Field(None, gt=0, description="Optimizer steps of the run; unset: all of them")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Where the decay ends, as a part of lr")
    tokens_per_microbatch: int = Field(16384, gt=0, description="Most padded tokens in one forward and backward pass")


class GroupedTrainOptions(TrainOptions):
    """What training engines take that can give parameters learning rates of their own."""

    lr_groups: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="Factors of lr by pattern of parameters' names, {'*.embed_tokens.*': 0.1}: the first that matches "
        "counts; 0 leaves a parameter as it is, and its gradient out of the norm",
    )


class LoraOptions(BaseModel):
    """Low-rank adapters (Hu et al. 2021, equation 3): `W + alpha / rank * B @ A`, of which only A and B are trained.

    A backend with the capability `lora` has a field `lora: LoraOptions | None = None`. B begins at zero: at first the
    model is the one it was. A is drawn with `ModelSpec.seed`, the same for every number of ranks.
    """

    model_config = ConfigDict(extra="forbid")

    rank: int = Field(16, gt=0)
    alpha: float = Field(32.0, gt=0, description="The adapters' product is scaled by alpha / rank")
    targets: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the linear layers to adapt, as q_proj; all-linear: all but the output layer"
    )


class RolloutOptions(EngineOptions):
    """What all rollout engines take."""

    max_model_tokens: int | None = Field(None, gt=0, description="Longest sequence; unset: the model's own limit")
    max_running: int = Field(1024, gt=0, description="Most completions generated at once")

    def gpus(self) -> int:
        """GPUs of a replica, where the run is on GPUs.

        A backend that can split a replica's model overrides it.
        """
        return 0 if self.servers() else 1

    def check_sampling(self, top_p: float, top_k: int, device: str, variables: Mapping[str, str]) -> None:
        """Check the options against how responses are drawn; called by `plan`, before any process starts.

        A backend that cannot cut the distribution everywhere overrides it. It imports no engine either.

        Args:
            top_p: as of `SamplingParams`; 1: nothing is cut by it.
            top_k: alike; 0: nothing is cut by it.
            device: torch device type of the run.
            variables: environment variables of the engine's processes, as far as they are known.

        Raises:
            ConfigError: they do not fit; the message says what would.
        """


class SplitRolloutOptions(RolloutOptions):
    """What all rollout engines take that can split a replica's model over processes."""

    tensor_parallel: int = Field(1, gt=0, description="Processes that a replica's model is split over")

    def gpus(self) -> int:
        """See `RolloutOptions.gpus`: one for each process."""
        return 0 if self.servers() else self.tensor_parallel

    def check_model(self, config: Mapping[str, Any]) -> None:
        """See `EngineOptions.check_model`: the processes of a replica share out the attention heads."""
        if heads := config.get("num_attention_heads"):
            check_divides("tensor_parallel", self.tensor_parallel, heads, f"the model's {heads} attention heads")
