"""The config of a run, as typed sections. The options of an engine, under `engine.options`, are typed by its backend.

`enginehouse_rl.config.load` loads configs, applies overrides and describes errors. `enginehouse_rl.plan.plan` checks
everything that depends on plugins, data or the model.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from enginehouse.engines.model import NO_FLOAT16
from enginehouse_rewards.batch import OnError
from enginehouse_rl.benchmarks.names import list_benchmarks


class Section(BaseModel):
    """A part of the config. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject `steps: true`, which pydantic would read as 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in (int, float):
            raise ValueError("expected a number, not true or false")
        return value


_VARIABLE = re.compile(r"\$\{\w+\}|(?:(?<=/)|^)\$[A-Za-z_]\w*")


def _refuse_variables(paths: str | Iterable[str]) -> None:
    """Reject a path that contains a variable such as `${NAME}`. This happens before pydantic checks the types of a
    union, because pydantic would repeat the problem for each type."""
    for path in [paths] if isinstance(paths, str) else paths:
        if variable := _VARIABLE.search(path):
            raise ValueError(
                f"{variable[0]} is not replaced in a path; only ~ is, by the home directory (${{NAME}} works in "
                "engine.env, and in arguments of rewards, environments and trackers): write the full path, or set it "
                "on the command line, where the shell replaces the variable"
            )


def _expand_path(path: str) -> str:
    _refuse_variables(path)
    return os.path.expanduser(path)


FilePath = Annotated[str, AfterValidator(_expand_path)]
"""Path of a file or directory. `~` is expanded to the home directory, because no shell does so in a YAML file."""


def _check_paths(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(path, str) for path in value)):
        _refuse_variables(value)
        return value
    raise ValueError("expected a path or a list of paths")


def _check_optional_paths(value: Any) -> Any:
    return value and _check_paths(value)


def _check_weighted_paths(value: Any) -> Any:
    if not isinstance(value, dict):
        return _check_paths(value)
    for path, weight in value.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(
                f"expected a number above 0 as the weight of {path}, not {weight!r} (leave out unused files)"
            )
    return _check_paths(list(value)) and value


class ModelConfig(Section):
    """The model to train, as a Hugging Face directory, GGUF file or hub name such as Qwen/Qwen3-0.6B@revision."""

    path: FilePath = Field(description="Directory, GGUF file or hub name of a causal language model with its tokenizer")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Dtype in which engines compute and weights are served. auto: bfloat16 on GPUs, float32 on CPUs. "
        "Trained parameters are kept in float32 in any case.",
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model's directory contains")

    @field_validator("dtype", mode="before")
    @classmethod
    def _no_half_without_scaling(cls, value: Any) -> Any:
        if value == "float16":  # one dtype for every role: the actor's among them
            raise ValueError(NO_FLOAT16)
        return value


_CHAT_TEMPLATE = Field(
    default=None,
    description="Use of the tokenizer's chat template. true: also for strings, each as one user message; false: "
    "never, so that a list of messages is an error. Unset: only for lists of messages.",
)
_SYSTEM = Field(
    default=None, min_length=1, description="System message for chats that begin without one. Unset: none is added."
)
_TOOLS = Field(
    default=None,
    description="Column that holds the tools that the model may call, for the chat template: a list of JSON schemas, "
    "or the JSON text of such a list. Unset: none.",
)
_ARGUMENTS = "Further arguments of the chat template by name, such as {enable_thinking: false}"
_TEMPLATE_PARAMETERS = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""The parameters of `apply_chat_template` itself."""


def _refuse_own_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    if own := [name for name in _TEMPLATE_PARAMETERS if name in arguments]:
        raise ValueError(f"data.template_arguments must not contain {own[0]!r}, because the run itself sets it")
    return arguments


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_refuse_own_arguments)]


class DataConfig(Section):
    """Prompts, as JSONL or Parquet files. The reward function also receives the other columns of the files."""

    train: FilePath | list[FilePath] | dict[FilePath, float] = Field(
        description="File of training prompts, or a list of files, or a mapping from each file to its weight, such "
        "as {a.jsonl: 3, b.jsonl: 1}. The weights set the fraction of prompts that comes from each file. A data set "
        "on the hub is written as name:configuration/split, such as openai/gsm8k:main/train, here and in every key "
        "for a data file."
    )
    order_by: str | None = Field(
        default=None,
        description="Column that holds a number. In each epoch of a file, or of a list of files, rows with lower "
        "numbers come first, and rows with equal numbers are shuffled. Unset: all rows are shuffled.",
    )
    validation: FilePath | dict[str, FilePath] | None = Field(
        default=None,
        description="File of held-out prompts, or several files by name, such as {aime: a.jsonl, gsm: b.parquet}. "
        "Unset: none.",
    )
    prompt: str = Field(
        default="prompt", description="Column that holds the prompt: a string, or a list of chat messages"
    )
    columns: dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Names under which rewards and environments receive other columns, or values inside them, such "
        "as {answer: solution} or {answer: reward_model.ground_truth}",
    )
    max_prompt_tokens: int = Field(
        default=1024,
        gt=0,
        description="Maximum prompt length in tokens. Prompts that leave no room for a response are also treated as "
        "too long.",
    )
    overlong_prompts: Literal["error", "drop"] = Field(
        default="error",
        description="Treatment of prompts that are too long. error: the run does not start; drop: they are left out.",
    )
    chat_template: bool | None = _CHAT_TEMPLATE
    system: str | None = _SYSTEM
    tools: str | None = _TOOLS
    template_arguments: TemplateArguments = Field(default_factory=dict, description=_ARGUMENTS)

    _paths = field_validator("train", mode="before")(_check_weighted_paths)

    @field_validator("validation", mode="before")
    @classmethod
    def _named_files(cls, value: Any) -> Any:
        if value is None:
            return value
        if isinstance(value, str):
            _refuse_variables(value)
            return value
        if not isinstance(value, dict) or not value or not all(isinstance(path, str) for path in value.values()):
            raise ValueError("expected the path of a file, or several paths by name, as in {aime: a.jsonl}")
        for name in value:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"expected names of letters, digits, _ . and -, not {name!r}")
        _refuse_variables(value.values())
        return value

    def validation_files(self) -> dict[str, str]:
        """Return the files of held-out prompts by name; a single file has the name ""."""
        if isinstance(self.validation, str):
            return {"": self.validation} if self.validation else {}
        return dict(self.validation or {})


class EngineConfig(Section):
    """The engine of a role, its Python environment and its options."""

    backend: str = Field(
        default="torch",
        description="Registered name of an engine, or distribution:name if two packages offer the same name",
    )
    runtime: str = Field(
        default="auto",
        description="Python environment of the engine's workers. auto: the environment of this process if it contains "
        "the engine, otherwise the engine's own runtime; current: the environment of this process; own: the engine's "
        "own runtime in any case. The name of a runtime or a path is accepted too.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the engine by name; `enginehouse plugins show NAME` lists them"
    )
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = Field(
        default_factory=dict,
        description="Environment variables of the engine's processes, such as {NCCL_SOCKET_IFNAME: eth0}, set before "
        "torch is imported. ${NAME} is replaced by a variable of the process that starts the run.",
    )

    @field_validator("env", mode="before")
    @classmethod
    def _as_texts(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        numbers = {name: str(number) for name, number in value.items() if type(number) in (int, float)}
        return {**value, **numbers}  # YAML reads the value of `{CUDA_DEVICE_MAX_CONNECTIONS: 1}` as a number


class ActorConfig(Section):
    """The policy, which is trained."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    processes: int = Field(
        default=1,
        gt=0,
        description="Number of processes in total. The engine's options decide how the model is split among them.",
    )


Temperature = Annotated[
    float,
    Field(ge=0, description="Sampling temperature, by which logits are divided. 0: greedy, the most likely token."),
]
TopP = Annotated[
    float, Field(gt=0, le=1, description="Probability mass of the most likely tokens to sample from. 1: all tokens.")
]
TopK = Annotated[int, Field(ge=0, description="Number of most likely tokens to sample from. 0: all tokens.")]


class SamplingConfig(Section):
    """Sampling of responses."""

    max_tokens: int = Field(
        default=256, gt=0, description="Maximum response length in tokens; longer responses are cut off"
    )
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    stop: list[str] = Field(
        default_factory=list, description="Strings that end a response; the string stays in the response"
    )


class FilterConfig(Section):
    """A filter that selects the groups to train on."""

    name: str = Field(description="Registered name of a filter, such as mixed_rewards, or module:function")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the filter by name; `enginehouse plugins show NAME` lists them"
    )


OnFailure = Literal["fail", "retry", "drop", "drop_group", "mask"]


class RolloutConfig(Section):
    """The engine that generates responses."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    replicas: int = Field(default=1, gt=0, description="Number of rollout engines, each with the whole model")
    placement: Literal["auto", "colocated", "shared", "separate"] = Field(
        default="auto",
        description="Location of the replicas. colocated: in the actor's processes, which requires replicas to equal "
        "actor.processes; shared: in separate processes on the actor's devices, taking turns with the actor; "
        "separate: in separate processes on other devices; auto: colocated if possible, otherwise separate, or "
        "shared if this machine has too few GPUs for separate.",
    )
    samples_per_prompt: int = Field(
        default=8, gt=0, description="Number of responses sampled for each prompt of a step"
    )
    cache_at_update: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="With train.staleness: what happens to the keys and values of responses that a weight update "
        "interrupts. recompute: they are computed again from the new weights; keep: the responses continue with those "
        "of the old weights, which saves time. Later prompts never use them.",
    )
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    keep: FilterConfig | None = Field(
        default=None,
        description="Filter that selects the groups (a prompt with its responses) to train on. Rejected groups are "
        "replaced by newly sampled ones. Unset: all groups are kept.",
    )
    extra_groups: int = Field(
        default=0,
        ge=0,
        description="Number of prompts that are begun in addition to those that a step needs. The step trains on the "
        "prompts that are answered first, which have the shorter responses. The prompts left over are answered again "
        "in a later step, so at most this number of prompts wait.",
    )
    on_failure: OnFailure = Field(
        default="fail",
        description="Treatment of an episode that raises, takes too long, or is lost with its replicas or worker. "
        "fail: the run ends; retry: the episode is repeated twice at most, then the run ends; drop: it is left out; "
        "drop_group: its whole group is left out; mask: only its prompt stays, with reward 0 and no token trained "
        "on. A group without any episode left is replaced by another prompt.",
    )
    episode_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Time limit in seconds for an episode with everything that it waits for, or for all episodes of "
        "a prompt if the environment runs them together. Unset: no limit.",
    )


class EnvironmentConfig(Section):
    """The environment, which turns a prompt into responses, and the processes that run it."""

    name: str = Field(
        default="single_turn",
        description="Registered name of an environment, or module:Class. single_turn: one response to each prompt, "
        "scored by the reward.",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments with which the environment is created, by name; `enginehouse plugins show NAME` lists "
        "them. ${NAME} is replaced by an environment variable.",
    )
    processes: int = Field(
        default=0,
        ge=0,
        description="Number of processes that run the environment. Each has its own reward.processes for the rewards, "
        "and tokens and texts do not pass through the controller. 0: the controller runs the environment.",
    )


class EvaluationSamplingConfig(Section):
    """Sampling of responses to validation prompts; greedy by default."""

    max_tokens: int | None = Field(
        default=None, gt=0, description="Maximum response length in tokens. Unset: rollout.sampling.max_tokens."
    )
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    stop: list[str] | None = Field(
        default=None, description="Strings that end a response. Unset: rollout.sampling.stop."
    )

    def complete(self, rollout: SamplingConfig) -> SamplingConfig:
        """Return the complete sampling settings; unset keys get the rollout's values."""
        own = {name: value for name, value in self.model_dump().items() if value is not None}
        return SamplingConfig(**{"max_tokens": rollout.max_tokens, "stop": rollout.stop, **own})


class EvaluationConfig(Section):
    """Validation of the policy on held-out prompts."""

    engine: EngineConfig | None = Field(
        default=None,
        description="Rollout engine in a separate process, which receives verified weights at each validation and "
        "answers the prompts while the next steps train. Unset: the rollout answers them, and training waits.",
    )
    sampling: EvaluationSamplingConfig = Field(default_factory=EvaluationSamplingConfig)
    samples_per_prompt: int = Field(
        default=1,
        gt=0,
        description="Number of responses sampled for each prompt of a validation. More than one adds mean@k, pass@k "
        "and majority@k.",
    )
    benchmarks: list[str] = Field(
        default_factory=list,
        description="Names of benchmarks to answer as well, such as [gsm8k, math500, aime, gpqa, mmlu_pro, ifeval]. "
        "lm-eval defines their prompts and scores, and the data sets come from the hub; gsm8k@REVISION selects a "
        "revision.",
    )
    max_prompts: int | None = Field(
        default=None,
        gt=0,
        description="Number of prompts to use from the beginning of each file, and of each task of a benchmark. "
        "Unset: all of them, at every validation.",
    )
    pass_threshold: float = Field(default=1.0, description="Smallest reward with which a response passes, for pass@k")
    by: str | None = Field(
        default=None,
        description="Column of the data, such as data_source. Validation metrics are also measured for each of its "
        "values. Unset: only for all prompts together.",
    )

    @field_validator("benchmarks")
    @classmethod
    def _known(cls, benchmarks: list[str]) -> list[str]:
        return [str(name) for name in list_benchmarks(benchmarks)]


class AuxiliaryModelConfig(Section):
    """A model of a role other than the actor, and the processes of this role."""

    engine: EngineConfig | None = Field(
        default=None,
        description="Training engine of the model. Unset: engine and options of the role whose processes the model "
        "shares, otherwise of the actor.",
    )
    processes: int | None = Field(
        default=None,
        gt=0,
        description="Number of separate processes. Unset: as many as the actor has, if no processes are shared.",
    )
    shares: Literal["actor", "critic", "reference", "reward_model"] | None = Field(
        default=None,
        description="Role in whose processes this model runs. Unset: actor, or none if engine or processes is set.",
    )
    path: FilePath | None = Field(default=None, description="Model directory. Unset: model.path.")


class ReferenceConfig(AuxiliaryModelConfig):
    """The frozen model to which a KL term or DPO keeps the policy close. It runs only if one of them needs it."""

    path: FilePath | None = Field(
        default=None,
        description="Model directory. Unset: model.path; for an actor with adapters, the actor's own base model.",
    )


_REWARD_ARGUMENTS: Any = Field(
    default_factory=dict,
    description="Arguments of the reward function by name, besides the columns of the data. ${NAME} is replaced by "
    "an environment variable.",
)


class NamedRewardConfig(Section):
    """One of several reward functions."""

    function: str = Field(description="Registered name of a reward function, or module:function")
    arguments: dict[str, Any] = _REWARD_ARGUMENTS
    weight: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="Factor by which its scores are multiplied before the rewards are added",
    )
    clip: tuple[float, float] | None = Field(
        default=None,
        description="Smallest and largest score, before normalization and weight; scores beyond a bound are set to it",
    )
    normalize: Literal["none", "group", "batch"] = Field(
        default="none",
        description="Normalization of scores, by their mean and standard deviation. group: over the group of a "
        "response; batch: over the step; none: scores stay as they are.",
    )

    @field_validator("clip")
    @classmethod
    def _in_order(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and not clip[0] < clip[1]:
            raise ValueError("expected the smallest score before the largest")
        return clip


class RewardConfig(Section):
    """The reward of a response, computed in a pool of processes."""

    function: str | None = Field(
        default=None,
        description="Registered name of a reward function, or module:function. Unset if several are under functions, "
        "or if only a reward model scores.",
    )
    arguments: dict[str, Any] = _REWARD_ARGUMENTS
    functions: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$")], NamedRewardConfig] = Field(
        default_factory=dict,
        description="Several reward functions by name, instead of function. Each runs in separate processes.",
    )
    processes: int = Field(default=1, gt=0, description="Number of processes that score responses")
    timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Time limit in seconds for scoring one response; for a batched reward, for one call",
    )
    concurrency: int = Field(
        default=32, gt=0, description="Number of responses that a process scores at the same time with an async reward"
    )
    on_error: OnError = Field(
        default="fail",
        description="Treatment of a response whose reward raises, times out or is not a number. fail: the run ends; "
        "zero: its score is 0, which is the best score if all others are negative; leave_out: it is left out of its "
        "group.",
    )
    max_failures: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Largest fraction of the responses of a step or validation that may be without a score. If there "
        "are more, the run ends, whatever on_error says.",
    )

    @model_validator(mode="after")
    def _one_or_several(self) -> RewardConfig:
        if self.function is not None and self.functions:
            raise ValueError("expected function or functions, not both")
        if self.functions and self.arguments:
            raise ValueError("expected no arguments beside functions: give each of the functions its arguments")
        return self

    def list_rewards(self) -> Mapping[str, NamedRewardConfig]:
        """Return the rewards by name; a single reward has an empty name. Empty if only a reward model scores."""
        if self.function is None:
            return self.functions
        return {"": NamedRewardConfig(function=self.function, arguments=self.arguments)}


class AdvantageConfig(Section):
    """The estimator of the advantage of each sample."""

    name: str = Field(default="grpo", description="Registered name of an advantage estimator, or module:function")
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the estimator by name; `enginehouse plugins show NAME` lists them",
    )


class LossConfig(Section):
    """The loss that the actor minimizes."""

    name: str = Field(default="clipped_policy", description="Registered name of a loss, or module:function")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the loss by name; `enginehouse plugins show NAME` lists them"
    )


KLEstimator = Literal["k1", "k2", "k3", "k3_unbiased"]


class CriticLossConfig(LossConfig):
    """The loss that the critic minimizes."""

    name: str = Field(default="clipped_value", description="Registered name of a loss, or module:function")


class CriticConfig(AuxiliaryModelConfig):
    """The model that estimates values, trained beside the actor. It runs only if the advantage needs values."""

    loss: CriticLossConfig = Field(default_factory=CriticLossConfig)
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Number of steps at the beginning of a run in which the critic is trained and the actor is not",
    )


class RewardModelConfig(AuxiliaryModelConfig):
    """A model that scores whole samples, beside the reward function or instead of it. It runs if it has a path."""

    path: FilePath | None = Field(
        default=None,
        description="Directory of a sequence classifier with one label and the actor's tokenizer, such as "
        "`enginehouse rm` trains. Unset: no reward model runs.",
    )
    weight: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="Factor by which the score is multiplied before it is added to the reward",
    )


class StageConfig(AuxiliaryModelConfig):
    """A stage that a plugin adds to every step, and its model if it has one."""

    path: FilePath | None = Field(default=None, description="Directory of the stage's model, if it has one")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the stage by name; `enginehouse plugins show NAME` lists them"
    )


class KLConfig(Section):
    """The term that keeps the policy close to the reference model."""

    coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the KL term. 0: there is no term, and no reference model runs for it."
    )
    estimator: KLEstimator | None = Field(
        default=None,
        description="Schulman's estimator of the divergence from one sample. The reward takes only k1, the loss only "
        "k2, k3 and k3_unbiased, because the others do not keep the policy close there. Unset: k1 in the reward, k3 "
        "in the loss.",
    )
    place: Literal["loss", "reward"] = Field(
        default="loss", description="Place of the KL term. loss: added to the loss; reward: subtracted from the reward."
    )
    target: float | None = Field(
        default=None,
        gt=0,
        description="Divergence in nats per token that the run aims at: each step adapts the coefficient; requires "
        "place=reward. Unset: the coefficient is constant.",
    )

    @property
    def chosen_estimator(self) -> KLEstimator:
        """The estimator in the config or, if unset, the default for the term's place."""
        return self.estimator or ("k1" if self.place == "reward" else "k3")


class AlgorithmConfig(Section):
    """The computation of advantages and of the loss."""

    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    epochs: int = Field(default=1, gt=0, description="Number of passes over the samples of each step")
    minibatches: int = Field(default=1, gt=0, description="Number of optimizer steps in each pass")
    mask_truncated: bool = Field(
        default=False,
        description="Train on no token of responses that were cut off at the maximum length. Their rewards still "
        "count.",
    )
    old_logprobs: Literal["rollout", "actor"] | None = Field(
        default=None,
        description="Log-probabilities in the denominator of the policy ratio. rollout: as the rollout engine reported "
        "them; actor: computed again by the actor. Unset: actor for a loss that needs those of the actor, such as "
        "gspo, for a clip range below 0.05 in bfloat16, and with train.staleness, where tokens also get importance "
        "weights; otherwise rollout.",
    )


class WeightsConfig(Section):
    """The transfer of the actor's weights to the rollout, and its verification."""

    transport: str = Field(
        default="auto", description="Registered name of a transport. auto: chosen by placement and capabilities."
    )
    adapter: Literal["merged", "alone"] = Field(
        default="merged",
        description="With adapters (lora): what an update sends. merged: all weights, with the adapter added; alone: "
        "the adapter, which the rollout engine adds to the model that it has loaded. Updates are then much shorter, "
        "but generation is slower.",
    )
    effect_check_every: int = Field(
        default=50,
        ge=0,
        description="Number of weight updates between two checks that compare log-probabilities of the rollout with "
        "those of the actor. The first update and the first that changes weights are checked too. If an engine "
        "cannot read all its weights back, every update that changes weights is checked. 0: never.",
    )
    effect_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Largest mean absolute difference of log-probabilities that is accepted, in nats. Unset: 0.02 in "
        "float32, 0.2 in bfloat16, 1.5 if the rollout engine serves quantized weights.",
    )


_SEED = Field(
    default=0, ge=0, lt=2**63, description="Random seed for data order, sampling and newly initialized weights"
)
_CHECKPOINT_EVERY = Field(
    default=0,
    ge=0,
    description="Number of steps between checkpoints, from which --resume continues. 0: checkpoints are written only "
    "as train.checkpoint_minutes sets, and when the run is interrupted or fails.",
)
_CHECKPOINT_MINUTES = Field(
    default=15.0,
    ge=0,
    description="Longest time in minutes between checkpoints, checked at the end of each step. 0: no limit.",
)
_CHECKPOINTS_KEPT = Field(
    default=2,
    gt=0,
    description="Number of newest checkpoints to keep. If one is damaged, --resume continues from the one before it.",
)


_SAVE_EVERY = Field(default=0, ge=0, description="Number of steps between model exports. 0: only at the end.")
_MODELS_KEPT = Field(
    default=None, gt=0, description="Number of newest model exports to keep, including the one at the end. Unset: all."
)
_EXPORT: Any = Field(
    default="merged",
    description="Form in which an actor with adapters is exported. merged: the merged model; adapter: the adapter, "
    "as peft reads it; both: the merged model, with the adapter in its subdirectory adapter/. An actor without "
    "adapters requires merged, which exports its model.",
)
Export = Literal["merged", "adapter", "both"]


def _within_steps(profiled: list[int], info: ValidationInfo) -> list[int]:
    """Reject a step to profile that the run does not have or that is listed twice."""
    for place, step in enumerate(profiled):
        if step in profiled[:place]:
            raise ValueError(f"step {step} is listed twice")
        if step > (steps := info.data.get("steps", math.inf)):
            raise ValueError(f"there is no step {step}: the last step is train.steps={steps}")
    return profiled


ProfileSteps = Annotated[
    list[Annotated[int, Field(gt=0, strict=True)]],
    AfterValidator(_within_steps),
    Field(
        description="Steps in which torch.profiler records each training process and the torch rollout engine. A trace "
        "of each is written to profiles/, and its longest spans to timeline.json. These steps take longer."
    ),
]


class TrainConfig(Section):
    """The training loop."""

    steps: int = Field(
        default=100, gt=0, description="Total number of steps of the run, including those before a --resume"
    )
    prompts_per_step: int = Field(
        default=32, gt=0, description="Number of prompts in a step, each with rollout.samples_per_prompt responses"
    )
    staleness: int = Field(
        default=0,
        ge=0,
        description="Number of weight versions by which a response may be behind. 0: responses are generated after "
        "each update; 1: responses of the next step are generated while this step trains; more: generation may run "
        "further ahead.",
    )
    seed: int = _SEED
    validate_every: int = Field(
        default=0,
        ge=0,
        description="Number of steps between validations. 0: only before the first step and after the last.",
    )
    samples_every: int = Field(default=10, ge=0, description="Number of steps between files of samples. 0: no files.")
    samples_tokens: int = Field(
        default=65_536,
        ge=0,
        description="Maximum number of tokens for which a file of samples lists log-probability, advantage and "
        "version, about 30 bytes for each token. They are the tokens of the first rows. 0: none.",
    )
    save_every: int = _SAVE_EVERY
    models_kept: int | None = _MODELS_KEPT
    save_best: str | None = Field(
        default=None,
        description="Validation metric, such as validation/reward. The model with the largest value so far is "
        "exported to models/best, in addition to the exports of save_every. The validation before the first step "
        "does not count. Unset: no such export.",
    )
    export: Export = _EXPORT
    checkpoint_every: int = _CHECKPOINT_EVERY
    checkpoint_minutes: float = _CHECKPOINT_MINUTES
    checkpoints_kept: int = _CHECKPOINTS_KEPT
    profile_steps: ProfileSteps = []


class ClusterConfig(Section):
    """The machines, the device and the time limits."""

    launcher: Literal["ray", "inline"] = Field(
        default="ray",
        description="Way of starting workers. ray: as Ray actors; inline: all in one process, for a debugger.",
    )
    address: str | None = Field(
        default=None, description="Address of a running Ray cluster. Unset: Ray is started on this machine."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device of all engines. auto: cuda if there is a GPU, otherwise cpu."
    )
    threads_per_process: int | None = Field(
        default=None,
        gt=0,
        description="Number of threads that torch uses inside an operation. Unset: 1 on CPUs; on GPUs the node's "
        "cores divided by its GPUs, at most 8.",
    )
    call_timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        description="Longest time in seconds that a worker's call may go without progress: a micro-batch computed, a "
        "token sampled, a parameter of a weight update sent. The switch to new weights and the start of workers may "
        "take as long, the start at least 300 s.",
    )


class PluginsConfig(Section):
    """The plugins that are loaded."""

    enabled: list[str] | None = Field(
        default=None, description="Names of the plugins to load. Unset: all installed plugins."
    )
    blocked: list[str] = Field(default_factory=list, description="Names of plugins that are not loaded")
    strict: bool = Field(
        default=False,
        description="End the run if an observer fails, instead of logging the error and dropping the observer",
    )


class TrackerConfig(Section):
    """A tracker, which receives metrics in addition to the run directory."""

    name: str = Field(description="Registered name of a tracker, such as tensorboard, wandb or mlflow, or module:Class")
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the tracker by name; `enginehouse plugins show NAME` lists them. ${NAME} is "
        "replaced by an environment variable.",
    )


class RunConfig(Section):
    """The run directory, and the trackers that also receive the metrics."""

    directory: FilePath = Field(default="runs/run", description="Directory for everything that the run writes")
    overwrite: bool = Field(
        default=False,
        description="Delete an earlier run in the directory. A run that did not finish and left checkpoints is "
        "deleted only if the command line sets this key.",
    )
    grace_seconds: float = Field(
        default=25.0,
        gt=0,
        description="Maximum seconds from SIGTERM or SIGHUP until checkpoint and model are saved; then the run is "
        "killed. After Ctrl-C there is no limit, and a second Ctrl-C kills the run.",
    )
    trackers: list[TrackerConfig] = Field(
        default_factory=list,
        description="Trackers that also receive the metrics, such as [{name: tensorboard}]. A tracker that fails "
        "does not end the run.",
    )


class Config(Section):
    """A reinforcement-learning run."""

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig)
    stages: dict[str, StageConfig] = Field(
        default_factory=dict,
        description="Stages of plugins that each step runs besides the built-in ones, by their registered names and "
        "in this order",
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    plugins: PluginsConfig = Field(default_factory=PluginsConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @property
    def is_validated(self) -> bool:
        """True if there are held-out prompts: files or benchmarks."""
        return bool(self.data.validation_files() or self.evaluation.benchmarks)


_RESPONSE = "a string, or a list of chat messages"


class SFTDataConfig(Section):
    """Demonstrations, as JSONL or Parquet files."""

    train: FilePath | list[FilePath] | dict[FilePath, float] = Field(
        description="File of demonstrations, or a list of files, or a mapping from each file to its weight. The "
        "weights set the fraction of rows that comes from each file."
    )
    validation: FilePath | list[FilePath] | None = Field(
        default=None, description="File of held-out demonstrations, or a list of files. Unset: none."
    )
    prompt: str = Field(
        default="prompt", description="Column that holds the prompt: a string, or a list of chat messages"
    )
    response: str = Field(
        default="response",
        description=f"Column that holds the response: {_RESPONSE}. Only the assistant's words are learned.",
    )
    conversation: str | None = Field(
        default=None,
        description="Column that holds a whole chat, instead of prompt and response. The messages before the "
        "assistant's first turn are the prompt, the rest is the response. Unset: prompt and response are used.",
    )
    max_tokens: int = Field(
        default=2048,
        gt=0,
        description="Maximum length in tokens of prompt and response together. Longer rows are an error.",
    )
    chat_template: bool | None = _CHAT_TEMPLATE
    system: str | None = _SYSTEM
    tools: str | None = _TOOLS
    template_arguments: TemplateArguments = Field(default_factory=dict, description=_ARGUMENTS)

    _paths = field_validator("train", mode="before")(_check_weighted_paths)
    _held_out = field_validator("validation", mode="before")(_check_optional_paths)


class SFTTrainConfig(Section):
    """The loop of supervised training."""

    steps: int = Field(
        default=100, gt=0, description="Total number of steps of the run, including those before a --resume"
    )
    rows_per_step: int = Field(
        default=128, gt=0, description="Number of demonstrations in a step, which is one optimizer step"
    )
    seed: int = _SEED
    validate_every: int = Field(
        default=0, ge=0, description="Number of steps between validations. 0: only after the last step."
    )
    save_every: int = _SAVE_EVERY
    models_kept: int | None = _MODELS_KEPT
    export: Export = _EXPORT
    checkpoint_every: int = _CHECKPOINT_EVERY
    checkpoint_minutes: float = _CHECKPOINT_MINUTES
    checkpoints_kept: int = _CHECKPOINTS_KEPT
    profile_steps: ProfileSteps = []


class SFTConfig(Section):
    """A supervised run, on the engines of reinforcement learning."""

    model: ModelConfig
    data: SFTDataConfig
    actor: ActorConfig = Field(default_factory=ActorConfig)
    train: SFTTrainConfig = Field(default_factory=SFTTrainConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    plugins: PluginsConfig = Field(default_factory=PluginsConfig)
    run: RunConfig = Field(default_factory=RunConfig)


class PreferenceDataConfig(Section):
    """Pairs of responses, as JSONL or Parquet files."""

    train: FilePath | list[FilePath] = Field(description="File of preferences, or a list of files")
    validation: FilePath | list[FilePath] | None = Field(
        default=None, description="File of held-out preferences, or a list of files. Unset: none."
    )
    prompt: str = Field(
        default="prompt",
        description="Column that holds the prompt: a string, or a list of chat messages. In files of pairs without "
        "this column, both responses begin with the prompt.",
    )
    chosen: str = Field(default="chosen", description=f"Column that holds the better response: {_RESPONSE}")
    rejected: str = Field(default="rejected", description=f"Column that holds the worse response: {_RESPONSE}")
    max_tokens: int = Field(
        default=2048,
        gt=0,
        description="Maximum length in tokens of a prompt with one response. Longer rows are an error.",
    )
    chat_template: bool | None = _CHAT_TEMPLATE
    system: str | None = _SYSTEM
    tools: str | None = _TOOLS
    template_arguments: TemplateArguments = Field(default_factory=dict, description=_ARGUMENTS)

    _paths = field_validator("train", mode="before")(_check_paths)

    _held_out = field_validator("validation", mode="before")(_check_optional_paths)


class RMDataConfig(PreferenceDataConfig):
    """Pairs of responses, as JSONL or Parquet files."""

    margin: str | None = Field(
        default=None, description="Column that holds the number by which the scores of a pair should differ. Unset: 0."
    )


class DPODataConfig(PreferenceDataConfig):
    """Pairs of responses or, for the loss kto, single responses with a label, as JSONL or Parquet files."""

    completion: str = Field(
        default="completion", description=f"Column that holds the response, for the loss kto: {_RESPONSE}"
    )
    label: str = Field(
        default="label",
        description="Column that holds true for a desirable response and false for an undesirable one, for the loss "
        "kto",
    )


class DPOAlgorithmConfig(Section):
    """The loss on preferences."""

    loss: Literal["sigmoid", "hinge", "ipo", "kto"] = Field(
        default="sigmoid",
        description="Preference loss. sigmoid: DPO as in its paper; hinge and ipo: other losses of pairs; kto: a "
        "loss of single responses with a label.",
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description="Strength with which the policy is kept close to the reference; a larger value keeps it closer",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Fraction of labels that are assumed to be wrong, for the loss sigmoid"
    )
    desirable_weight: float = Field(default=1.0, ge=0, description="Weight of desirable responses, for the loss kto")
    undesirable_weight: float = Field(
        default=1.0, ge=0, description="Weight of undesirable responses, for the loss kto"
    )


class PreferenceTrainConfig(Section):
    """The loop of training on preferences."""

    steps: int = Field(
        default=100, gt=0, description="Total number of steps of the run, including those before a --resume"
    )
    rows_per_step: int = Field(
        default=64,
        gt=0,
        description="Number of rows in a step, which is one optimizer step. A row is a pair or, for the loss kto, a "
        "single response.",
    )
    seed: int = _SEED
    validate_every: int = Field(
        default=0, ge=0, description="Number of steps between validations. 0: only after the last step."
    )
    save_every: int = _SAVE_EVERY
    models_kept: int | None = _MODELS_KEPT
    export: Export = _EXPORT
    checkpoint_every: int = _CHECKPOINT_EVERY
    checkpoint_minutes: float = _CHECKPOINT_MINUTES
    checkpoints_kept: int = _CHECKPOINTS_KEPT
    profile_steps: ProfileSteps = []


class RMConfig(Section):
    """A run that trains a reward model, on the engines of reinforcement learning."""

    model: ModelConfig
    data: RMDataConfig
    actor: ActorConfig = Field(default_factory=ActorConfig)
    train: PreferenceTrainConfig = Field(default_factory=PreferenceTrainConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    plugins: PluginsConfig = Field(default_factory=PluginsConfig)
    run: RunConfig = Field(default_factory=RunConfig)


class DPOConfig(Section):
    """A run that trains a policy on preferences, on the engines of reinforcement learning."""

    model: ModelConfig
    data: DPODataConfig
    actor: ActorConfig = Field(default_factory=ActorConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    algorithm: DPOAlgorithmConfig = Field(default_factory=DPOAlgorithmConfig)
    train: PreferenceTrainConfig = Field(default_factory=PreferenceTrainConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    plugins: PluginsConfig = Field(default_factory=PluginsConfig)
    run: RunConfig = Field(default_factory=RunConfig)


PreferenceConfig = DPOConfig | RMConfig
AnyConfig = Config | SFTConfig | DPOConfig | RMConfig
SCHEMAS: dict[str, type[AnyConfig]] = {"train": Config, "sft": SFTConfig, "dpo": DPOConfig, "rm": RMConfig}
"""The class of each config, by the command that runs it."""
