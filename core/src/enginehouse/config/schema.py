"""The config of a run: one typed tree. What a backend adds is typed by the backend, under `engine.options`.

Loading, overrides and error messages are in `enginehouse.config.load`; what can only be checked against plugins, data
and model is in `enginehouse.config.plan`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


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


class Model(Section):
    """The model that is trained, a Hugging Face directory."""

    path: str = Field(description="Directory of a Hugging Face causal language model with its tokenizer")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="What engines compute in and weights are served in"
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model's directory brings")


class Data(Section):
    """Prompts, as JSONL or Parquet files. Columns besides the prompt are handed to the reward function."""

    train: str = Field(description="File of training prompts")
    validation: str | None = Field(default=None, description="File of held-out prompts; the first 256 are used")
    prompt: str = Field(default="prompt", description="Column with the prompt: a string, or a list of chat messages")
    max_prompt_tokens: int = Field(default=1024, gt=0, description="Longer prompts are an error")
    chat_template: bool | None = Field(
        default=None, description="Apply the tokenizer's chat template; unset: to messages only"
    )


class Engine(Section):
    """Which backend plays a role, and its own options."""

    backend: str = Field(
        default="torch", description="A registered name, or distribution:name where two packages offer it"
    )
    runtime: str = Field(
        default="auto",
        description="Python environment of its workers: auto (this one if it has the engine, else the backend's own "
        "runtime), current, a runtime's name, or a path",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the backend, checked by its own type")


class Actor(Section):
    """The policy being trained."""

    engine: Engine = Field(default_factory=Engine)
    processes: int = Field(default=1, gt=0, description="How many in all; how they share the model, options say")


class Sampling(Section):
    """How responses are drawn."""

    max_tokens: int = Field(default=256, gt=0, description="Longest response; longer ones are cut there")
    temperature: float = Field(default=1.0, ge=0, description="Logits are divided by it; 0: the likeliest token")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Draw from the likeliest tokens that have this much mass")
    top_k: int = Field(default=0, ge=0, description="Draw from this many of the likeliest tokens; 0: from all")
    stop: list[str] = Field(default_factory=list, description="Strings that end a response; they stay in it")


class Rollout(Section):
    """The engine that generates."""

    engine: Engine = Field(default_factory=Engine)
    replicas: int = Field(default=1, gt=0, description="Engines, each with the whole model")
    placement: Literal["auto", "colocated", "separate"] = Field(
        default="auto",
        description="In the actor's processes (replicas then equal actor.processes), or in processes of its own; auto: "
        "colocated where it can be",
    )
    samples_per_prompt: int = Field(default=8, gt=0, description="Responses drawn for each prompt of a step")
    sampling: Sampling = Field(default_factory=Sampling)


class Evaluation(Section):
    """What answers the validation prompts."""

    engine: Engine | None = Field(
        default=None,
        description="A rollout backend, in a process of its own that gets the weights, verified, before each "
        "validation; unset: the rollout",
    )


class Reference(Section):
    """The frozen model a KL term holds the policy near to, on the actor's backend. It runs only for a KL term."""

    path: str | None = Field(default=None, description="Model directory; unset: model.path")


class Reward(Section):
    """The reward of a response, computed in a pool of processes."""

    function: str = Field(description="A registered name, or module:function")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Given to it by name, besides the data's columns"
    )
    processes: int = Field(default=1, gt=0, description="How many responses are scored at once")
    timeout_seconds: float = Field(default=30.0, gt=0, description="Longest time for one response")
    on_error: Literal["fail", "zero"] = Field(default="fail", description="What a reward that raises or times out does")


class Advantage(Section):
    """How a sample is credited."""

    name: str = Field(default="grpo", description="A registered name, or module:function")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Given to it by name")


class Loss(Section):
    """What the actor minimises."""

    name: str = Field(default="clipped_policy", description="A registered name, or module:function")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Given to it by name")


class KL(Section):
    """Divergence from the reference model."""

    coefficient: float = Field(default=0.0, ge=0, description="Its weight; 0: no reference model runs")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="Schulman's estimators from one sample")
    place: Literal["loss", "reward"] = Field(default="loss", description="Added to the loss, or taken off the reward")


class Algorithm(Section):
    """How rewards become a gradient."""

    advantage: Advantage = Field(default_factory=Advantage)
    loss: Loss = Field(default_factory=Loss)
    kl: KL = Field(default_factory=KL)
    epochs: int = Field(default=1, gt=0, description="Passes over each step's samples")
    minibatches: int = Field(default=1, gt=0, description="Optimizer steps a pass")
    old_logprobs: Literal["rollout", "actor"] = Field(
        default="rollout",
        description="What the ratio divides by: the rollout's own logprobs, or the actor's computed anew",
    )


class Weights(Section):
    """How the rollout gets the actor's weights, and how that is verified."""

    transport: str = Field(default="auto", description="A registered transport; auto: by placement and capabilities")
    effect_check_every: int = Field(
        default=50,
        ge=0,
        description="Compare the rollout's logprobs with the actor's at the first and then every N updates; 0: never",
    )
    effect_tolerance: float = Field(default=0.05, gt=0, description="Largest mean absolute logprob difference allowed")


_SEED = Field(default=0, ge=0, description="Of all that is drawn: the order of data, samples, new weights")
_CHECKPOINT_EVERY = Field(
    default=0,
    ge=0,
    description="Steps between checkpoints for --resume, of which two are kept; 0: only if it is interrupted or fails",
)


class Train(Section):
    """The loop."""

    steps: int = Field(default=100, gt=0, description="Of the whole run, those before a --resume included")
    prompts_per_step: int = Field(default=32, gt=0, description="Each with rollout.samples_per_prompt responses")
    seed: int = _SEED
    validate_every: int = Field(
        default=0,
        ge=0,
        description="Steps between validations; 0: only before the first step and after the last",
    )
    samples_every: int = Field(default=10, ge=0, description="Steps between files of samples; 0: none")
    save_every: int = Field(default=0, ge=0, description="Steps between model exports; 0: only at the end")
    checkpoint_every: int = _CHECKPOINT_EVERY


class Cluster(Section):
    """Where it runs and how long anything may take."""

    launcher: Literal["ray", "inline"] = Field(default="ray", description="inline: one process, for a debugger")
    address: str | None = Field(default=None, description="A running Ray cluster; unset: start Ray on this machine")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is a GPU")
    threads_per_process: int = Field(default=1, gt=0, description="Of torch, inside an operation")
    call_timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        description="Longest time for any one call of a worker; a start may take as long, and 300 s in any case",
    )


class Plugins(Section):
    """Which plugins are loaded."""

    enabled: list[str] | None = Field(default=None, description="Only these; unset: all that are installed")
    blocked: list[str] = Field(default_factory=list, description="Not these")
    strict: bool = Field(default=False, description="A failing observer ends the run")


class Run(Section):
    """The run directory."""

    directory: str = Field(default="runs/run", description="Where everything the run writes goes")
    overwrite: bool = Field(default=False, description="Delete what an earlier run left there")
    grace_seconds: float = Field(
        default=25.0,
        gt=0,
        description="Longest time from Ctrl-C, SIGTERM or SIGHUP to the end, state and model saved; then it is forced",
    )


class Config(Section):
    """A reinforcement-learning run."""

    model: Model
    data: Data
    reward: Reward
    actor: Actor = Field(default_factory=Actor)
    rollout: Rollout = Field(default_factory=Rollout)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    reference: Reference = Field(default_factory=Reference)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    weights: Weights = Field(default_factory=Weights)
    train: Train = Field(default_factory=Train)
    cluster: Cluster = Field(default_factory=Cluster)
    plugins: Plugins = Field(default_factory=Plugins)
    run: Run = Field(default_factory=Run)


class SFTData(Section):
    """Demonstrations, as JSONL or Parquet files."""

    train: str = Field(description="File of demonstrations")
    prompt: str = Field(default="prompt", description="Column with the prompt: a string, or a list of chat messages")
    response: str = Field(default="response", description="Column with the response, a string; only it is learned")
    max_tokens: int = Field(default=2048, gt=0, description="Longer prompt and response together are an error")
    chat_template: bool | None = Field(
        default=None, description="Apply the tokenizer's chat template; unset: to messages only"
    )


class SFTTrain(Section):
    """The supervised loop."""

    steps: int = Field(default=100, gt=0, description="Of the whole run, those before a --resume included")
    rows_per_step: int = Field(default=128, gt=0, description="Demonstrations of an optimizer step")
    seed: int = _SEED
    checkpoint_every: int = _CHECKPOINT_EVERY


class SFTConfig(Section):
    """A supervised run, on the same engines."""

    model: Model
    data: SFTData
    actor: Actor = Field(default_factory=Actor)
    train: SFTTrain = Field(default_factory=SFTTrain)
    cluster: Cluster = Field(default_factory=Cluster)
    plugins: Plugins = Field(default_factory=Plugins)
    run: Run = Field(default_factory=Run)
