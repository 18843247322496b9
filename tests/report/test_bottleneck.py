"""Where a step's time goes: the cause that a run was built with is found, and what is advised can be done."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from enginehouse.cli.main import main
from enginehouse.errors import UserError
from enginehouse_report.bottleneck import Bottleneck, find_bottleneck
from enginehouse_rl.config.load import dump_config, load_config
from enginehouse_rl.config.schema import Config, DPOConfig, RMConfig, SFTConfig
from enginehouse_rl.runs import RunDirectory

PHASES = {"generate": 0.4, "reward": 0.01, "old_logprobs": 0.0, "reference": 0.0, "advantage": 0.01, "update": 0.4}
GRPO = """
model: {path: m}
data: {train: d.jsonl}
reward: {function: "f:g"}
"""
CONFIGS: dict[str, tuple[type, str]] = {
    "train": (Config, GRPO),
    "sft": (SFTConfig, "model: {path: m}\ndata: {train: d.jsonl}\n"),
    "dpo": (DPOConfig, "model: {path: m}\ndata: {train: d.jsonl}\n"),
    "rm": (RMConfig, "model: {path: m}\ndata: {train: d.jsonl}\n"),
}
ONE, OTHER = {"node": "a", "pid": 1}, {"node": "a", "pid": 2}
APART = {"actor": [ONE], "rollout": [OTHER]}


def made(
    path: Path,
    seconds: Mapping[str, float] | None = None,
    *overrides: str,
    kind: str = "train",
    steps: int = 10,
    roles: Mapping[str, Any] = APART,
    others: Mapping[str, float] | None = None,
    untold: float = 0.02,
    between: float = 0.0,
    validating: bool = False,
) -> Path:
    """A run whose steps all have these seconds.

    Args:
        path: where.
        seconds: of phases, for `PHASES`.
        overrides: of the config.
        kind: the command.
        steps: how many.
        roles: as the record has them.
        others: figures beside.
        untold: seconds of a step in no phase.
        between: seconds between steps.
        validating: whether the timeline says that they went to validations.
    """
    schema, text = CONFIGS[kind]
    file = path / "config.yaml"
    file.write_text(text)
    run = RunDirectory.create(path / "run", dump_config(load_config(file, overrides, schema)))
    run.record.update(roles=roles)
    phases = {**(PHASES if kind == "train" else {}), **(seconds or {})}
    whole = sum(phases.values()) + untold
    figures = {f"time/{name}": value for name, value in phases.items()} | {"time/step": whole}
    figures["busy/update"] = phases.get("update", 0.0) * 0.95
    if kind == "train":
        figures |= {"rollout/busy_seconds": phases["generate"] * 0.95, "rollout/utilisation": 1.0}
    lines = []
    for step in range(1, steps + 1):
        ended = step * (whole + between)
        run.timeline.span(f"step {step}", ended - whole, ended)
        if validating:
            run.timeline.span("validate", ended, ended + between)
        slow = 50.0 if step <= 2 else 1.0  # the first ones say nothing
        row = {name: value * slow for name, value in figures.items()} | (others or {})
        lines.append({"step": step, "elapsed_seconds": ended, **row})
    run.finish("finished")
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run.path


def checked(path: Path, found: Bottleneck, kind: str = "train") -> list[str]:
    """The keys that are advised, each of which the schema takes with the value that is to be tried."""
    schema, text = CONFIGS[kind]
    file = path / "tried.yaml"
    file.write_text(text)
    for one in found.advice:
        load_config(file, [f"{one.key}={one.attempt}"], schema)
        assert f"{one.key}={one.attempt} (now {'unset' if one.now is None else one.now})" in found.said
    return [one.key for one in found.advice]


CAUSES: dict[str, tuple[dict[str, Any], tuple[str, ...], str, list[str]]] = {
    "generation while nothing else goes on": (
        {"seconds": {"generate": 2.0, "update": 0.8}}, (), "rollout", ["train.staleness", "rollout.replicas"]
    ),
    "generation in the actor's processes": (
        {"seconds": {"generate": 4.0}, "roles": {"actor": [ONE], "rollout": [ONE]}}, (), "rollout", ["actor.processes"]
    ),
    "generation that runs ahead already": (
        {"seconds": {"generate": 2.0}, "others": {"rollout/busy_seconds": 2.4}}, ("train.staleness=1",), "rollout",
        ["rollout.replicas"],
    ),
    "the longest answers": (
        {
            "seconds": {"generate": 4.0},
            "others": {"rollout/busy_seconds": 2.0, "rollout/utilisation": 0.5},
            "roles": {"actor": [ONE], "rollout": [OTHER, {"node": "a", "pid": 3}]},
        },
        (), "rollout", ["rollout.extra_groups", "rollout.replicas"],
    ),
    "a reward that takes its time": (
        {"seconds": {"reward": 3.0}}, ("reward.processes=3",), "reward", ["reward.processes", "train.staleness"]
    ),
    "a reward with a model beside": (
        {"seconds": {"reward": 3.0}}, ("reward_model.path=rm",), "reward",
        ["reward.processes", "reward_model.processes"],
    ),
    "generation without an engine at work": (
        {"seconds": {"generate": 3.0}, "others": {"rollout/busy_seconds": 0.2}}, (), "controller",
        ["environment.processes", "train.prompts_per_step"],
    ),
    "slow tools": (
        {"seconds": {"generate": 3.0}, "others": {"rollout/busy_seconds": 2.9, "episode/in_tools": 0.8}}, (),
        "environment", ["environment.processes"],
    ),
    "the update": (
        {"seconds": {"update": 3.0}}, ("algorithm.epochs=4",), "actor", ["actor.processes", "algorithm.epochs"]
    ),
    "logprobs computed anew": ({"seconds": {"old_logprobs": 3.0}}, (), "actor", ["actor.processes"]),
    "the critic's update": (
        {"seconds": {"update": 3.0}, "others": {"busy/update": 0.5, "busy/update/critic": 2.9}}, (), "critic",
        ["critic.processes"],
    ),
    "the critic's values": ({"seconds": {"values": 3.0}}, (), "critic", ["critic.processes"]),
    "the reference": ({"seconds": {"reference": 3.0}}, (), "reference", ["reference.processes"]),
    "the reward model": (
        {"seconds": {"reward": 3.0}}, ("reward_model.path=rm", "reward.function=null"), "reward_model",
        ["reward_model.processes"],
    ),
    "weights on one host": ({"seconds": {"sync": 3.0}}, (), "sync", ["rollout.placement"]),
    "weights between hosts": (
        {"seconds": {"sync": 3.0}, "roles": {"actor": [ONE], "rollout": [{"node": "b", "pid": 2}]}}, (), "sync",
        ["weights.transport"],
    ),
    "turns": ({"seconds": {"turns": 3.0}}, ("rollout.placement=shared",), "turns", ["rollout.placement"]),
    "the controller": (
        {"untold": 3.0}, ("environment.processes=2",), "controller", ["environment.processes", "train.prompts_per_step"]
    ),
    "what is between an update's end and its processes": (
        {"seconds": {"update": 3.0}, "others": {"busy/update": 0.1}}, (), "controller",
        ["environment.processes", "train.prompts_per_step"],
    ),
    "validations": (
        {"between": 3.0, "validating": True}, ("train.validate_every=5",), "validation",
        ["train.validate_every", "evaluation.max_prompts"],
    ),
    "what is between steps": ({"between": 3.0}, (), "controller", ["environment.processes", "train.prompts_per_step"]),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_what_a_run_waits_for_is_found_with_a_key_that_exists(tmp_path: Path, cause: str):
    arguments, overrides, who, expected = CAUSES[cause]
    arguments = dict(arguments)
    found = find_bottleneck(made(tmp_path, arguments.pop("seconds", None), *overrides, **arguments))
    assert next(iter(found.shares)) == who, found.said
    assert sum(found.shares.values()) == pytest.approx(1.0)
    keys = checked(tmp_path, found)
    assert keys[: len(expected)] == expected
    assert "\n" not in found.said
    assert f"{found.shares[who]:.0%}" in found.said


@pytest.mark.parametrize(
    ("kind", "seconds", "expected"),
    [
        ("sft", {"data": 0.1, "update": 1.0}, ["actor.processes"]),
        ("sft", {"data": 3.0, "update": 1.0}, ["train.rows_per_step"]),
        ("dpo", {"data": 0.1, "score": 2.0, "update": 1.0}, ["actor.processes"]),
        ("rm", {"data": 0.1, "score": 0.1, "update": 0.2, "validation": 3.0}, ["train.validate_every"]),
    ],
)
def test_runs_of_other_commands_have_fewer_parts(tmp_path, kind, seconds, expected):
    found = find_bottleneck(made(tmp_path, seconds, kind=kind, roles={"actor": [ONE]}))
    assert checked(tmp_path, found, kind) == expected
    assert not {"rollout", "reward", "environment"} & found.shares.keys()


def test_medians_bear_a_step_that_was_slow_and_shares_are_those_of_the_seconds(tmp_path: Path):
    path = made(tmp_path, {"generate": 3.0}, untold=0.58)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows[6] |= {"time/update": 900.0, "busy/update": 900.0, "time/step": 905.0}
    rows[7] |= {"time/step": None}  # not a number in the run
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = find_bottleneck(path)
    assert found.steps == 7
    assert found.shares["rollout"] == pytest.approx(3.0 / found.step_seconds, rel=0.06)
    assert found.phases["update"] == 0.4


def test_where_no_part_stands_out_nothing_is_advised(tmp_path: Path):
    found = find_bottleneck(made(tmp_path, {"generate": 0.4, "update": 0.4, "sync": 0.4, "reference": 0.4}))
    assert found.advice == []
    assert "No part stands out" in found.said


def test_of_a_few_steps_nothing_is_said_nor_of_those_that_were_profiled(tmp_path: Path):
    path = made(tmp_path, {}, "train.profile_steps=[3,4,5,6]")
    found = find_bottleneck(path)
    assert (found.steps, found.shares, found.advice) == (4, {}, ())
    assert found.said == (
        "The run has 10 steps, 4 of them after the first 2 and without a profile: at least 5 are needed to say where "
        "the time goes."
    )


def test_the_inline_launcher_comes_before_more_processes(tmp_path: Path):
    found = find_bottleneck(made(tmp_path, {"update": 3.0}, "cluster.launcher=inline"))
    assert checked(tmp_path, found) == ["cluster.launcher"]


def test_the_command_says_the_load_where_it_advises_more_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    said = CliRunner().invoke(main, ["bottleneck", str(made(tmp_path, {"update": 3.0}))]).output.splitlines()
    assert said[-1].startswith("The load average of this machine is 999 on ")
    other = tmp_path / "other"
    other.mkdir()
    said = CliRunner().invoke(main, ["bottleneck", str(made(other, {"sync": 3.0}))]).output
    assert "load average" not in said


def test_the_command_prints_a_paragraph_or_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    path = made(tmp_path, {"update": 3.0})
    found = find_bottleneck(path)
    said = CliRunner().invoke(main, ["bottleneck", str(path)])
    assert (said.exit_code, said.output) == (0, found.said + "\n")
    figures = json.loads(CliRunner().invoke(main, ["bottleneck", str(path), "--json"]).output)
    assert figures["shares"] == found.shares
    assert figures["advice"][0]["key"] == "actor.processes"
    assert CliRunner().invoke(main, ["bottleneck", str(tmp_path / "none")]).exit_code == 2
    with pytest.raises(UserError, match="is no run directory"):
        find_bottleneck(tmp_path)
