"""The config of a run: one typed tree. What a backend adds is typed by the backend, under `engine.options`.

Loading, overrides and error messages are in `enginehouse_rl.config.load`; what can only be checked against plugins,
data and model is in `enginehouse_rl.plan.plan`.
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
    """A part of the config: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `steps: true`, which pydantic would read as 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in (int, float):
            raise ValueError("a number is wanted, not true or false")
        return value


_VARIABLE = re.compile(r"\$\{\w+\}|(?:(?<=/)|^)\$[A-Za-z_]\w*")


def _refuse_variables(paths: str | Iterable[str]) -> None:
    """Refuse a variable in a path, before a pydantic union reports a problem of each of its types."""
    for path in [paths] if isinstance(paths, str) else paths:
        if variable := _VARIABLE.search(path):
            raise ValueError(
                f"{variable[0]}: no variable is put into a path, only ~ is the home directory (${{NAME}} is for "
                "engine.env, and for arguments of rewards, environments and trackers): write the path in full, or give "
                "it on the command line, where the shell puts it in"
            )


def _expand_path(path: str) -> str:
    _refuse_variables(path)
    return os.path.expanduser(path)


FilePath = Annotated[str, AfterValidator(_expand_path)]
"""A path of a file or directory; `~` is the home directory, which no shell puts for it in a YAML file."""


def _check_paths(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(path, str) for path in value)):
        _refuse_variables(value)
        return value
    raise ValueError("a path is wanted, or a list of paths")


def _check_optional_paths(value: Any) -> Any:
    return value and _check_paths(value)


def _check_weighted_paths(value: Any) -> Any:
    if not isinstance(value, dict):
        return _check_paths(value)
    for path, weight in value.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"the weight of {path} is {weight!r}: a number above 0 is wanted; leave out what has none")
    return _check_paths(list(value)) and value


class ModelConfig(Section):
    """The model that is trained, a Hugging Face directory or a name on the hub, as Qwen/Qwen3-0.6B@revision."""

    path: FilePath = Field(
        description="Directory, GGUF file, or name on the hub, of a causal language model with its tokenizer"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="What engines compute in and weights are served in; auto: bfloat16 on GPUs, float32 on CPUs. What "
        "is trained is kept in float32 in any case",
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model's directory brings")

    @field_validator("dtype", mode="before")
    @classmethod
    def _no_half_without_scaling(cls, value: Any) -> Any:
        if value == "float16":  # one dtype for every role: the actor's among them
            raise ValueError(NO_FLOAT16)
        return value


_CHAT_TEMPLATE = Field(default=None, description="Apply the tokenizer's chat template; unset: to messages only")
_SYSTEM = Field(
    default=None, min_length=1, description="System message of chats that begin with none; unset: they have none"
)
_TOOLS = Field(
    default=None,
    description="Column with what the model may call, for the chat template: a list of JSON schemas, or its text",
)
_ARGUMENTS = "What the chat template is given besides, by name, as {enable_thinking: false}"
_OF_RENDERING = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""The arguments of `apply_chat_template` itself."""


def _refuse_own_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    if own := [name for name in _OF_RENDERING if name in arguments]:
        raise ValueError(f"{own[0]!r} is said by the run itself, not by data.template_arguments")
    return arguments


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_refuse_own_arguments)]


class DataConfig(Section):
    """Prompts, as JSONL or Parquet files. Columns besides the prompt are handed to the reward function."""

    train: FilePath | list[FilePath] | dict[FilePath, float] = Field(
        description="File of training prompts, or a list of files; or the weight of each by its path, {a.jsonl: 3, "
        "b.jsonl: 1}: the share of prompts that is drawn from it. A data set on the hub is openai/gsm8k:main/train, "
        "its name, configuration and split; so in every data key"
    )
    order_by: str | None = Field(
        default=None,
        description="Column with a number: in each epoch of a file, or of a list of files, rows with a lower one come "
        "first, and equal ones are shuffled; unset: all are shuffled",
    )
    validation: FilePath | dict[str, FilePath] | None = Field(
        default=None, description="File of held-out prompts; or several by name, {aime: a.jsonl, gsm: b.parquet}"
    )
    prompt: str = Field(default="prompt", description="Column with the prompt: a string, or a list of chat messages")
    columns: dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Names by which rewards and environments get other columns, or values in them, as "
        "{answer: solution} or {answer: reward_model.ground_truth}",
    )
    max_prompt_tokens: int = Field(
        default=1024, gt=0, description="A longer prompt is too long, as is one that leaves a response no room"
    )
    overlong_prompts: Literal["error", "drop"] = Field(
        default="error", description="What is done about prompts that are too long: refuse them, or leave them out"
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
                raise ValueError(f"{name!r} cannot name a file: give a name of letters, digits, _ . and -")
        _refuse_variables(value.values())
        return value

    def validation_files(self) -> dict[str, str]:
        """Return the files of held-out prompts by name; a single one has the name ""."""
        if isinstance(self.validation, str):
            return {"": self.validation} if self.validation else {}
        return dict(self.validation or {})


class EngineConfig(Section):
    """Which backend plays a role, and its own options."""

    backend: str = Field(
        default="torch", description="A registered name, or distribution:name where two packages offer it"
    )
    runtime: str = Field(
        default="auto",
        description="Python environment of its workers: auto (this one if it has the engine, else the backend's own "
        "runtime), current, own (the backend's runtime in any case), a runtime's name, or a path",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the backend, checked by its own type")
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = Field(
        default_factory=dict,
        description="Environment variables of its processes, set before torch is imported, as "
        "{NCCL_SOCKET_IFNAME: eth0}; ${NAME} stands for one of this process's",
    )

    @field_validator("env", mode="before")
    @classmethod
    def _as_texts(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        numbers = {name: str(number) for name, number in value.items() if type(number) in (int, float)}
        return {**value, **numbers}  # `{CUDA_DEVICE_MAX_CONNECTIONS: 1}`, in which YAML sees a number


class ActorConfig(Section):
    """The policy being trained."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    processes: int = Field(default=1, gt=0, description="How many in all; how they share the model, options say")


class SamplingConfig(Section):
    """How responses are drawn."""

    max_tokens: int = Field(default=256, gt=0, description="Longest response; longer ones are cut there")
    temperature: float = Field(default=1.0, ge=0, description="Logits are divided by it; 0: the likeliest token")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Draw from the likeliest tokens that have this much mass")
    top_k: int = Field(default=0, ge=0, description="Draw from this many of the likeliest tokens; 0: from all")
    stop: list[str] = Field(default_factory=list, description="Strings that end a response; they stay in it")


class FilterConfig(Section):
    """Which groups are trained on."""

    name: str = Field(description="A registered name, as mixed_rewards, or module:function")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Given to it by name; `enginehouse plugins show NAME` lists them"
    )


OnFailure = Literal["fail", "retry", "drop", "drop_group", "mask"]


class RolloutConfig(Section):
    """The engine that generates."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    replicas: int = Field(default=1, gt=0, description="Engines, each with the whole model")
    placement: Literal["auto", "colocated", "shared", "separate"] = Field(
        default="auto",
        description="In the actor's processes (colocated; replicas then equal actor.processes), or in processes of its "
        "own: on the actor's devices, taking turns with it (shared), or beside them (separate); auto: colocated where "
        "it can be, else separate, and shared where there are too few GPUs on this machine for that",
    )
    samples_per_prompt: int = Field(default=8, gt=0, description="Responses drawn for each prompt of a step")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    keep: FilterConfig | None = Field(
        default=None,
        description="Which prompts' responses are trained on; others are drawn instead of those it refuses; unset: all",
    )
    extra_groups: int = Field(
        default=0,
        ge=0,
        description="Prompts begun beyond those that a step needs, which trains on those that are answered first, the "
        "shorter ones; those that are left over are drawn again, so that no more than so many stay behind",
    )
    on_failure: OnFailure = Field(
        default="fail",
        description="What an episode does that raises, takes too long or is lost with its replicas or worker: end the "
        "run; be made again (twice, then end the run); be left out; be left out with its whole group; or stay as its "
        "prompt, with reward 0 and not trained on. A group without an episode left is dropped and another prompt drawn",
    )
    episode_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Longest time for making an episode, or those of a prompt where they are made together, with all "
        "that it waits for; unset: any",
    )


class EnvironmentConfig(Section):
    """What makes the responses to a prompt, and where that is done."""

    name: str = Field(
        default="single_turn",
        description="A registered name, or module:Class; single_turn: one answer to each prompt, scored by the reward",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Given to it by name as it is made; `enginehouse plugins show NAME` lists them; ${NAME} stands for "
        "an environment variable",
    )
    processes: int = Field(
        default=0,
        ge=0,
        description="Processes that do it, each with reward.processes of its own: tokens and texts do not pass the "
        "controller then; 0: the controller",
    )


class EvaluationSamplingConfig(Section):
    """How responses to validation prompts are drawn; greedily, unless it says otherwise."""

    max_tokens: int | None = Field(
        default=None, gt=0, description="Longest response; unset: rollout.sampling.max_tokens"
    )
    temperature: float = Field(default=0.0, ge=0, description="As of rollout.sampling; 0: the likeliest token")
    top_p: float = Field(default=1.0, gt=0, le=1, description="As of rollout.sampling")
    top_k: int = Field(default=0, ge=0, description="As of rollout.sampling")
    stop: list[str] | None = Field(
        default=None, description="Strings that end a response; unset: those of rollout.sampling"
    )

    def complete(self, rollout: SamplingConfig) -> SamplingConfig:
        """Return the whole sampling, in which unset keys have the rollout's values."""
        own = {name: value for name, value in self.model_dump().items() if value is not None}
        return SamplingConfig(**{"max_tokens": rollout.max_tokens, "stop": rollout.stop, **own})


class EvaluationConfig(Section):
    """How the policy is validated on held-out prompts, and what answers them."""

    engine: EngineConfig | None = Field(
        default=None,
        description="A rollout backend, in a process of its own that gets the weights, verified, at each validation "
        "and answers while the next steps train; unset: the rollout, and training waits",
    )
    sampling: EvaluationSamplingConfig = Field(default_factory=EvaluationSamplingConfig)
    samples_per_prompt: int = Field(
        default=1,
        gt=0,
        description="Responses drawn for each prompt of a validation; several: mean@k, pass@k and majority@k",
    )
    benchmarks: list[str] = Field(
        default_factory=list,
        description="Benchmarks that are answered besides, by name, as [gsm8k, math500, aime, gpqa, mmlu_pro, ifeval]: "
        "prompts and scores are those of lm-eval, the data sets come from the hub; gsm8k@REVISION names a revision",
    )
    max_prompts: int | None = Field(
        default=None,
        gt=0,
        description="Use the first so many prompts of each file, and of each task of a benchmark; unset: all, each of "
        "which is answered and scored at every validation",
    )
    pass_threshold: float = Field(default=1.0, description="A response passes, for pass@k, with at least this reward")
    by: str | None = Field(
        default=None, description="Column of the data, as data_source: figures of each of its values are measured too"
    )

    @field_validator("benchmarks")
    @classmethod
    def _known(cls, benchmarks: list[str]) -> list[str]:
        return [str(name) for name in list_benchmarks(benchmarks)]


class AuxiliaryModelConfig(Section):
    """A model beside the actor's, and where it runs."""

    engine: EngineConfig | None = Field(
        default=None,
        description="A training backend; unset: that of the role whose processes it shares, else the actor's, with "
        "that role's options",
    )
    processes: int | None = Field(
        default=None,
        gt=0,
        description="How many of its own; unset: where nothing is shared as many as the actor's",
    )
    shares: Literal["actor", "critic", "reference", "reward_model"] | None = Field(
        default=None,
        description="The role in whose processes it lives; unset: actor, or none where engine or processes are set",
    )
    path: FilePath | None = Field(default=None, description="Model directory; unset: model.path")


class ReferenceConfig(AuxiliaryModelConfig):
    """The frozen model a KL term, or DPO, holds the policy near to. It runs only for these."""

    path: FilePath | None = Field(
        default=None, description="Model directory; unset: model.path, of an actor with adapters its own base"
    )


_REWARD_ARGUMENTS: Any = Field(
    default_factory=dict,
    description="Given to it by name, besides the data's columns; ${NAME} stands for an environment variable",
)


class NamedRewardConfig(Section):
    """One of several rewards."""

    function: str = Field(description="A registered name, or module:function")
    arguments: dict[str, Any] = _REWARD_ARGUMENTS
    weight: float = Field(default=1.0, allow_inf_nan=False, description="Its scores are multiplied by it, then added")
    clip: tuple[float, float] | None = Field(default=None, description="Least and largest score; beyond, these count")
    normalize: Literal["none", "group", "batch"] = Field(
        default="none",
        description="Take the mean off a score and divide it by the deviation, of its group or of the step",
    )

    @field_validator("clip")
    @classmethod
    def _in_order(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and not clip[0] < clip[1]:
            raise ValueError("the least score comes first, and is less than the largest")
        return clip


class RewardConfig(Section):
    """The reward of a response, computed in a pool of processes."""

    function: str | None = Field(
        default=None, description="A registered name, or module:function; unset where there are several"
    )
    arguments: dict[str, Any] = _REWARD_ARGUMENTS
    functions: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$")], NamedRewardConfig] = Field(
        default_factory=dict, description="Several by name, in place of function; each in processes of its own"
    )
    processes: int = Field(default=1, gt=0, description="How many processes score responses")
    timeout_seconds: float = Field(
        default=30.0, gt=0, description="Longest time for one response; of a batched reward, for one call"
    )
    concurrency: int = Field(
        default=32, gt=0, description="How many responses a process has at work at once, of an async reward"
    )
    on_error: OnError = Field(
        default="fail",
        description="What a response does whose reward raises, times out or is no number: end the run, be scored 0 "
        "(which is best where others are below 0), or be left out of its group",
    )
    max_failures: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of a step's or validation's responses that may be without a score; more end the run, "
        "whatever on_error says",
    )

    @model_validator(mode="after")
    def _one_or_several(self) -> RewardConfig:
        if self.function is not None and self.functions:
            raise ValueError("one function is wanted, or several under functions")
        if self.functions and self.arguments:
            raise ValueError("each of the functions has arguments of its own")
        return self

    def list_rewards(self) -> Mapping[str, NamedRewardConfig]:
        """Return the rewards by name, the only one by an empty name; none if only a reward model scores."""
        if self.function is None:
            return self.functions
        return {"": NamedRewardConfig(function=self.function, arguments=self.arguments)}


class AdvantageConfig(Section):
    """How a sample is credited."""

    name: str = Field(default="grpo", description="A registered name, or module:function")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Given to it by name; `enginehouse plugins show NAME` lists them"
    )


class LossConfig(Section):
    """What the actor minimises."""

    name: str = Field(default="clipped_policy", description="A registered name, or module:function")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Given to it by name; `enginehouse plugins show NAME` lists them"
    )


KLEstimator = Literal["k1", "k2", "k3", "k3_unbiased"]


class CriticLossConfig(LossConfig):
    """What the critic minimises."""

    name: str = Field(default="clipped_value", description="A registered name, or module:function")


class CriticConfig(AuxiliaryModelConfig):
    """The model that estimates values, trained beside the actor. It runs only for an advantage that needs them."""

    loss: CriticLossConfig = Field(default_factory=CriticLossConfig)
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps at the beginning of a run in which it is trained and the actor is not"
    )


class RewardModelConfig(AuxiliaryModelConfig):
    """A model that scores whole samples, beside the reward's function or instead of one. It runs if it has a path."""

    path: FilePath | None = Field(
        default=None,
        description="Directory of a sequence classifier with one label and the actor's tokenizer, as `enginehouse rm` "
        "trains; unset: no reward model runs",
    )
    weight: float = Field(
        default=1.0, allow_inf_nan=False, description="Its score is multiplied by it and added to the reward"
    )


class StageConfig(AuxiliaryModelConfig):
    """A stage of a step that a plugin brings, and its model, where it has one."""

    path: FilePath | None = Field(default=None, description="Directory of its model, where it has one")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Given to it by name; `enginehouse plugins show NAME` lists them"
    )


class KLConfig(Section):
    """Divergence from the reference model."""

    coefficient: float = Field(default=0.0, ge=0, description="Its weight; 0: no reference model runs")
    estimator: KLEstimator | None = Field(
        default=None,
        description="Schulman's estimators from one sample: only k1 holds the policy by the reward, only k2, k3 and "
        "k3_unbiased by the loss; unset: k1 in the reward, k3 in the loss",
    )
    place: Literal["loss", "reward"] = Field(default="loss", description="Added to the loss, or taken off the reward")
    target: float | None = Field(
        default=None,
        gt=0,
        description="Divergence in nats a token that the coefficient is adapted to, step by step, with place reward; "
        "unset: it stays",
    )

    @property
    def chosen_estimator(self) -> KLEstimator:
        """The estimator that the config names, else the usual one for the term's place."""
        return self.estimator or ("k1" if self.place == "reward" else "k3")


class AlgorithmConfig(Section):
    """How rewards become a gradient."""

    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    epochs: int = Field(default=1, gt=0, description="Passes over each step's samples")
    minibatches: int = Field(default=1, gt=0, description="Optimizer steps a pass")
    mask_truncated: bool = Field(
        default=False,
        description="Train on no token of responses that were cut at their longest; their rewards count all the same",
    )
    old_logprobs: Literal["rollout", "actor"] | None = Field(
        default=None,
        description="What the ratio divides by: the rollout's own logprobs, or the actor's computed anew; unset: the "
        "rollout's, but the actor's for a loss that needs them, as gspo, for a clip range below 0.05 in bfloat16, and "
        "with train.staleness, weighted by how far the rollout's are from them",
    )


class WeightsConfig(Section):
    """How the rollout gets the actor's weights, and how that is verified."""

    transport: str = Field(default="auto", description="A registered transport; auto: by placement and capabilities")
    effect_check_every: int = Field(
        default=50,
        ge=0,
        description="Compare the rollout's logprobs with the actor's at the first, the first that changes weights, and "
        "then every N updates; at every one where an engine cannot be read back; 0: never",
    )
    effect_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Largest mean absolute logprob difference allowed; unset: 0.02 nats in float32, 0.2 in bfloat16",
    )


_SEED = Field(default=0, ge=0, lt=2**63, description="Of all that is drawn: the order of data, samples, new weights")
_CHECKPOINT_EVERY = Field(
    default=0,
    ge=0,
    description="Steps between checkpoints for --resume; 0: only by train.checkpoint_minutes, and if the run is "
    "interrupted or fails",
)
_CHECKPOINT_MINUTES = Field(
    default=15.0,
    ge=0,
    description="Longest time between checkpoints for --resume, looked at when a step ends; 0: any",
)
_CHECKPOINTS_KEPT = Field(
    default=2, gt=0, description="The newest checkpoints; one that is damaged is passed over for the one before it"
)


_SAVE_EVERY = Field(default=0, ge=0, description="Steps between model exports; 0: only at the end")
_MODELS_KEPT = Field(
    default=None, gt=0, description="The newest model exports, the one at the end among them; unset: all"
)
_EXPORT: Any = Field(
    default="merged",
    description="What is saved of an actor with adapters: the merged model; the adapter, as peft reads it; or both, "
    "the adapter in the model's directory under adapter/. Without adapters there is only the model",
)
Export = Literal["merged", "adapter", "both"]


def _within_steps(profiled: list[int], info: ValidationInfo) -> list[int]:
    """Refuse to profile a step that a run does not have, or one twice."""
    for place, step in enumerate(profiled):
        if step in profiled[:place]:
            raise ValueError(f"step {step} is there twice")
        if step > (steps := info.data.get("steps", math.inf)):
            raise ValueError(f"there is no step {step}: train.steps={steps} is the last one")
    return profiled


ProfileSteps = Annotated[
    list[Annotated[int, Field(gt=0, strict=True)]],
    AfterValidator(_within_steps),
    Field(
        description="Steps in which torch.profiler looks at each training process, and at the torch rollout engine: a "
        "trace of each in profiles/, its longest spans in timeline.json. Such steps take longer"
    ),
]


class TrainConfig(Section):
    """The loop."""

    steps: int = Field(default=100, gt=0, description="Of the whole run, those before a --resume included")
    prompts_per_step: int = Field(default=32, gt=0, description="Each with rollout.samples_per_prompt responses")
    staleness: int = Field(
        default=0,
        ge=0,
        description="How many weight versions a response may be behind: 0 draws after each update; 1 draws the next "
        "step's while this one trains; more let generation run further ahead",
    )
    seed: int = _SEED
    validate_every: int = Field(
        default=0,
        ge=0,
        description="Steps between validations; 0: only before the first step and after the last",
    )
    samples_every: int = Field(default=10, ge=0, description="Steps between files of samples; 0: none")
    samples_tokens: int = Field(
        default=65_536,
        ge=0,
        description="Tokens of a file of samples that are written one by one, with logprob, advantage and version: "
        "those of the first rows that have no more; about 30 bytes each. 0: none",
    )
    save_every: int = _SAVE_EVERY
    models_kept: int | None = _MODELS_KEPT
    save_best: str | None = Field(
        default=None,
        description="Metric of a validation, as validation/reward: the model with the largest so far is exported to "
        "models/best, besides those of save_every; that before the first step does not count",
    )
    export: Export = _EXPORT
    checkpoint_every: int = _CHECKPOINT_EVERY
    checkpoint_minutes: float = _CHECKPOINT_MINUTES
    checkpoints_kept: int = _CHECKPOINTS_KEPT
    profile_steps: ProfileSteps = []


class ClusterConfig(Section):
    """Where it runs and how long anything may take."""

    launcher: Literal["ray", "inline"] = Field(default="ray", description="inline: one process, for a debugger")
    address: str | None = Field(default=None, description="A running Ray cluster; unset: start Ray on this machine")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is a GPU")
    threads_per_process: int | None = Field(
        default=None,
        gt=0,
        description="Of torch, inside an operation; unset: on CPUs 1, on GPUs the node's cores divided by its GPUs, at "
        "most 8",
    )
    call_timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        description="Longest time that a call of a worker may make no progress (a micro-batch computed, a token "
        "drawn), and for a weight update in all; a start may take as long, and 300 s in any case",
    )


class PluginsConfig(Section):
    """Which plugins are loaded."""

    enabled: list[str] | None = Field(default=None, description="Only these; unset: all that are installed")
    blocked: list[str] = Field(default_factory=list, description="Not these")
    strict: bool = Field(default=False, description="A failing observer ends the run")


class TrackerConfig(Section):
    """What metrics are sent to, besides the run directory."""

    name: str = Field(description="A registered name, as tensorboard, wandb or mlflow, or module:Class")
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Given to it by name; ${NAME} stands for an environment variable; `enginehouse plugins show NAME` "
        "lists them",
    )


class RunConfig(Section):
    """The run directory, and what else gets the metrics."""

    directory: FilePath = Field(default="runs/run", description="Where everything the run writes goes")
    overwrite: bool = Field(
        default=False,
        description="Delete what an earlier run left there; one that did not finish and left checkpoints only if this "
        "is given on the command line",
    )
    grace_seconds: float = Field(
        default=25.0,
        gt=0,
        description="Longest time from SIGTERM or SIGHUP to the end, state and model saved; then it is forced. After "
        "Ctrl-C it may take any time, and a second one forces it",
    )
    trackers: list[TrackerConfig] = Field(
        default_factory=list, description="What metrics are sent to as well, as [{name: tensorboard}]; none ends a run"
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
        description="Stages of plugins that a step has besides core's own, by their registered names, in this order",
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    plugins: PluginsConfig = Field(default_factory=PluginsConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @property
    def is_validated(self) -> bool:
        """True if there are held-out prompts, files of them or benchmarks."""
        return bool(self.data.validation_files() or self.evaluation.benchmarks)


_RESPONSE = "a string, or a list of chat messages"


class SFTDataConfig(Section):
    """Demonstrations, as JSONL or Parquet files."""

    train: FilePath | list[FilePath] | dict[FilePath, float] = Field(
        description="File of demonstrations, or a list of files; or the weight of each by its path: the share of rows "
        "that is drawn from it"
    )
    validation: FilePath | list[FilePath] | None = Field(
        default=None, description="File of held-out demonstrations, or a list of files; unset: none"
    )
    prompt: str = Field(default="prompt", description="Column with the prompt: a string, or a list of chat messages")
    response: str = Field(
        default="response",
        description=f"Column with the response: {_RESPONSE}; only the assistant's words are learned",
    )
    conversation: str | None = Field(
        default=None,
        description="Column with a whole chat, in place of the two: what stands before the assistant's first turn is "
        "the prompt, the rest the response",
    )
    max_tokens: int = Field(default=2048, gt=0, description="Longer prompt and response together are an error")
    chat_template: bool | None = _CHAT_TEMPLATE
    system: str | None = _SYSTEM
    tools: str | None = _TOOLS
    template_arguments: TemplateArguments = Field(default_factory=dict, description=_ARGUMENTS)

    _paths = field_validator("train", mode="before")(_check_weighted_paths)
    _held_out = field_validator("validation", mode="before")(_check_optional_paths)


class SFTTrainConfig(Section):
    """The supervised loop."""

    steps: int = Field(default=100, gt=0, description="Of the whole run, those before a --resume included")
    rows_per_step: int = Field(default=128, gt=0, description="Demonstrations of an optimizer step")
    seed: int = _SEED
    validate_every: int = Field(default=0, ge=0, description="Steps between validations; 0: only after the last")
    save_every: int = _SAVE_EVERY
    models_kept: int | None = _MODELS_KEPT
    export: Export = _EXPORT
    checkpoint_every: int = _CHECKPOINT_EVERY
    checkpoint_minutes: float = _CHECKPOINT_MINUTES
    checkpoints_kept: int = _CHECKPOINTS_KEPT
    profile_steps: ProfileSteps = []


class SFTConfig(Section):
    """A supervised run, on the same engines."""

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
        default=None, description="File of held-out preferences, or a list of files; unset: none"
    )
    prompt: str = Field(
        default="prompt",
        description="Column with the prompt: a string, or a list of chat messages; in files of pairs without it both "
        "responses begin with the prompt",
    )
    chosen: str = Field(default="chosen", description=f"Column with the better response: {_RESPONSE}")
    rejected: str = Field(default="rejected", description="Column with the worse response")
    max_tokens: int = Field(default=2048, gt=0, description="A longer prompt with a response is an error")
    chat_template: bool | None = _CHAT_TEMPLATE
    system: str | None = _SYSTEM
    tools: str | None = _TOOLS
    template_arguments: TemplateArguments = Field(default_factory=dict, description=_ARGUMENTS)

    _paths = field_validator("train", mode="before")(_check_paths)

    _held_out = field_validator("validation", mode="before")(_check_optional_paths)


class RMDataConfig(PreferenceDataConfig):
    """Pairs of responses, as JSONL or Parquet files."""

    margin: str | None = Field(
        default=None, description="Column with a number, by how much the scores are to differ; unset: 0"
    )


class DPODataConfig(PreferenceDataConfig):
    """Pairs of responses, or for the loss kto single ones with a label, as JSONL or Parquet files."""

    completion: str = Field(default="completion", description=f"Of kto, column with the response: {_RESPONSE}")
    label: str = Field(default="label", description="Of kto, column that says whether it is desirable: true or false")


class DPOAlgorithmConfig(Section):
    """How preferences become a gradient."""

    loss: Literal["sigmoid", "hinge", "ipo", "kto"] = Field(
        default="sigmoid", description="sigmoid is DPO as of its paper; kto takes single responses with a label"
    )
    beta: float = Field(default=0.1, gt=0, description="How dear it is to leave the reference")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Of sigmoid, the share of labels that are taken to be wrong"
    )
    desirable_weight: float = Field(default=1.0, ge=0, description="Of kto, the weight of desirable responses")
    undesirable_weight: float = Field(default=1.0, ge=0, description="Of kto, the weight of the others")


class PreferenceTrainConfig(Section):
    """The loop over preferences."""

    steps: int = Field(default=100, gt=0, description="Of the whole run, those before a --resume included")
    rows_per_step: int = Field(default=64, gt=0, description="Rows of the data, pairs that is, of an optimizer step")
    seed: int = _SEED
    validate_every: int = Field(default=0, ge=0, description="Steps between validations; 0: only after the last")
    save_every: int = _SAVE_EVERY
    models_kept: int | None = _MODELS_KEPT
    export: Export = _EXPORT
    checkpoint_every: int = _CHECKPOINT_EVERY
    checkpoint_minutes: float = _CHECKPOINT_MINUTES
    checkpoints_kept: int = _CHECKPOINTS_KEPT
    profile_steps: ProfileSteps = []


class RMConfig(Section):
    """A run that trains a reward model, on the same engines."""

    model: ModelConfig
    data: RMDataConfig
    actor: ActorConfig = Field(default_factory=ActorConfig)
    train: PreferenceTrainConfig = Field(default_factory=PreferenceTrainConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    plugins: PluginsConfig = Field(default_factory=PluginsConfig)
    run: RunConfig = Field(default_factory=RunConfig)


class DPOConfig(Section):
    """A run that trains a policy on preferences, on the same engines."""

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
"""By the command that runs it."""
