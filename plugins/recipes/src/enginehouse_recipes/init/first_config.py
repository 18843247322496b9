"""Writes the config of a first run, from a recipe or a template and the answers, and explains each key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse_recipes.init.prompt_data import SAMPLES

if TYPE_CHECKING:
    from enginehouse_recipes.init.machines import Engines, Machine
    from enginehouse_recipes.init.models import ChosenModel
    from enginehouse_recipes.init.prompt_data import PromptData

RUN = "runs/first"
TEMPLATE = Path(__file__).parent / "templates" / "config.yaml"
TINY_STEPS = 100
"""Maximum number of steps for the tiny model."""

HINTS = {
    "data.overlong_prompts": "drop lets a first run start; `plan` reports how many are left out",
    "data.chat_template": "Text becomes a message of the user, because the model has a template; false: it stays text",
    "reward.function": "It is in this directory, and test_reward.py tests it. Change it first: a run learns what is "
    "rewarded, not what is meant",
    "actor.engine.options.lr": "Learning rate: the first number to change. Halve it if the reward falls or the entropy "
    "collapses, double it if nothing changes",
    "rollout.samples_per_prompt": "They are compared with each other: more of them compare better, but take longer",
    "rollout.sampling.max_tokens": "Raise it if many responses are cut (`truncated` in the terminal)",
    "rollout.sampling.temperature": "1.0 samples as the model would; lower values give less variety to learn from",
    "evaluation.sampling.temperature": "1.0: as in training, so that both rewards can be compared",
    "environment.arguments": "`max_turns` counts the model's turns: a call of the tool, and the text after its result",
    "algorithm.advantage.name": "grpo needs no critic; `enginehouse recipes list` has others",
    "algorithm.kl.coefficient": "It keeps the model near where it began; 0 removes this, and saves a forward pass",
    "train.steps": "Enough to see whether the model learns; raise it then",
    "train.prompts_per_step": "More prompts make a step's direction more reliable, but take longer",
    "train.checkpoint_every": "`enginehouse train config.yaml --resume` continues from the newest",
    "cluster.device": "The device of your answer; a machine without it rejects the config",
    "run.directory": "A directory that has a run is rejected: name another for the next, run.directory=runs/second",
}
"""Comments by key, after the key's description: the reason for its value, or what to change first."""


def choose_recipe(rows: PromptData) -> str:
    """Return the recipe with which the tiny model learns from the rows."""
    return SAMPLES["calculator" if rows.tools else "sorting"]


def config_text(model: ChosenModel, rows: PromptData, machine: Machine, engines: Engines) -> str:
    from enginehouse.plugin import RolloutBackend, TrainBackend, plugins, resolve
    from enginehouse_recipes import recipe
    from enginehouse_recipes.init.commented import write_commented
    from enginehouse_rl.config.document import parse
    from enginehouse_rl.config.schema import Config

    source = TEMPLATE if model.path else recipe(choose_recipe(rows)).path
    values, _ = parse(source.read_text(encoding="utf-8"), str(source))
    values = _merge(values, _choose_machine_values(machine, engines, bool(model.path)))
    values = _merge(values, {"reward": {"function": "reward:score"}, "run": {"directory": RUN}})
    if not model.path:
        steps = min(values["train"]["steps"], TINY_STEPS)
        values = _merge(values, {"train": {"steps": steps, "checkpoint_every": steps // 2}})
    else:
        values = _merge(values, _choose_data_values(values, model, rows))
        if not rows.validation:
            del values["evaluation"], values["train"]["validate_every"]
    options = {
        "actor.engine.options": plugins().get(TrainBackend, engines.train, elsewhere=True),
        "rollout.engine.options": plugins().get(RolloutBackend, engines.rollout, elsewhere=True),
    }
    hints = {**HINTS, "rollout.engine.backend": engines.others, "data.train": f"Here: {rows.summary}"}
    head = (
        "# A first run. Any key can be overridden on the command line: enginehouse train config.yaml train.steps=20\n"
        "# Paths are relative to where the command is run. `enginehouse keys` lists all keys, with their defaults.\n\n"
    )
    return head + write_commented(
        values, Config, hints, {key: resolve(backend.options) for key, backend in options.items()}
    )


def _choose_machine_values(machine: Machine, engines: Engines, large: bool) -> dict[str, Any]:
    """Return the values that depend on the machine. `large` is true if the model is not the tiny one."""
    processes = max(machine.gpus, 1)
    values: dict[str, Any] = {
        "actor": {"processes": processes, "engine": {"backend": engines.train}},
        "rollout": {
            "placement": "auto" if engines.train == engines.rollout else "shared",
            "replicas": processes,
            "engine": {"backend": engines.rollout},
        },
        "cluster": {"device": "cuda" if machine.gpus else "cpu"},
    }
    if machine.address:
        values["cluster"]["address"] = machine.address
    if large and not machine.gpus:
        small = {"samples_per_prompt": 4, "sampling": {"max_tokens": 128}}
        short = {"steps": 20, "prompts_per_step": 4, "validate_every": 10}
        values = _merge(values, {"rollout": small, "train": short, "evaluation": {"max_prompts": 16}})
    return values


def _choose_data_values(values: Mapping[str, Any], model: ChosenModel, rows: PromptData) -> dict[str, Any]:
    """Return the values that depend on the user's model and data."""
    most, longest = values["rollout"]["sampling"]["max_tokens"], values["data"]["max_prompt_tokens"]
    if model.positions is not None:
        most = min(most, model.positions // 2)
        longest = min(longest, model.positions - most)
    data: dict[str, Any] = {"train": rows.train, "prompt": rows.prompt, "max_prompt_tokens": longest}
    if rows.validation:
        data["validation"] = rows.validation
    if not rows.chats:
        data["chat_template"] = model.chats
    result: dict[str, Any] = {
        "model": {"path": model.path},
        "data": data,
        "rollout": {"sampling": {"max_tokens": most}},
        "train": {"prompts_per_step": min(values["train"]["prompts_per_step"], rows.count)},
    }
    if rows.tools:
        result["environment"] = {"name": "tools", "arguments": {"tools": ["calculator"], "max_turns": 3}}
    return result


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings. Values of the second mapping win."""
    merged = dict(first)
    for name, value in second.items():
        are_mappings = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merge(merged[name], value) if are_mappings else value
    return merged
