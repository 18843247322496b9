"""What enginehouse brings itself: every record leads to something that is there."""

import dataclasses
import inspect

import pytest

from enginehouse.plugin import KINDS, load_plugins, resolve
from enginehouse.plugin.builtin import BUILTIN

PROVIDED = [one for one in load_plugins(enabled=[]).providers() if one.plugin.internal]


def test_core_declares_these_and_no_others():
    names = {kind.kind: [] for kind in KINDS}
    for provided in PROVIDED:
        names[provided.record.kind].append(provided.record.name)
    assert names == {
        "train": [],
        "rollout": [],
        "transport": ["inproc", "shared_memory", "collective", "point_to_point", "differences"],
        "dispatch_mode": ["one_to_all", "all_to_all", "rank_zero", "dp"],
        "advantage": [
            *("distillation", "gae", "gdpo", "gpg", "grpo", "opo", "process_rewards"),
            *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo"),
        ],
        "loss": [
            *("cispo", "clipped_policy", "gspo", "policy_gradient", "sapo"),
            *("clipped_value", "supervised", "weighted_logprob", "weighted_value"),
        ],
        "reward": ["code", "exact_match", "format", "length", "math", "numeric", "served"],
        "filter": ["mixed_rewards"],
        "tracker": ["tensorboard", "wandb", "mlflow"],
        "environment": ["single_turn"],
        "stage": [],
    }


def test_it_declares_by_its_own_plugins_alone():
    modules = tuple(dict.fromkeys(one.plugin.module for one in PROVIDED))
    assert modules == (
        *BUILTIN,
        "enginehouse_rewards.plugin",
        "enginehouse_rl.plugin",
        "enginehouse_transports.plugin",
    )
    assert {one.plugin.distribution for one in PROVIDED} == {"enginehouse"}


@pytest.mark.parametrize("provided", PROVIDED, ids=lambda one: f"{one.record.kind}-{one.record.name}")
def test_every_reference_of_a_built_in_record_leads_somewhere(provided):
    for field in provided.record.references:
        found = resolve(getattr(provided.record, field))
        assert callable(found)
        assert inspect.getdoc(found), f"{found} has no docstring"


@pytest.mark.parametrize("provided", PROVIDED, ids=lambda one: f"{one.record.kind}-{one.record.name}")
def test_every_built_in_record_has_a_summary_of_one_line(provided):
    assert 10 < len(provided.record.summary) < 110
    assert provided.record.summary[-1] != "."


def test_records_carry_no_code():
    for provided in PROVIDED:
        for field in dataclasses.fields(provided.record):
            assert not callable(getattr(provided.record, field.name))
