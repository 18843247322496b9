"""Environment variables of a role's processes (`engine.env`): which a config may set, and where they get to."""

from collections.abc import Callable

import pytest
from projects import refusal

from enginehouse_rl.plan.plan import Plan

KL = "algorithm.kl.coefficient=0.1"


def test_each_role_has_the_variables_of_its_own_engine(make: Callable[..., Plan]):
    planned = make(
        "actor.engine.env.CUDA_DEVICE_MAX_CONNECTIONS=1",
        "rollout.engine.env={NCCL_SOCKET_IFNAME: eth0}",
        "rollout.placement=separate",
        "evaluation.engine.backend=torch",
        "data.validation=train.jsonl",
        KL,
    )
    assert {name: dict(role.env) for name, role in planned.roles.items()} == {
        "actor": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        "reference": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},  # by the actor's engine
        "rollout": {"NCCL_SOCKET_IFNAME": "eth0"},
        "evaluation": {},
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.engine.env.CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES cannot be set: the placement of the role"),
        ("rollout.engine.env.OMP_NUM_THREADS=4", "rollout.engine.env.OMP_NUM_THREADS cannot be set: cluster.threads"),
        ("actor.engine.env.RANK=0", "RANK cannot be set: the process's rank"),
        ("actor.engine.env.RAY_ADDRESS=x", "RAY_ADDRESS cannot be set: Ray reads it"),
        ("actor.engine.env.LD_PRELOAD=x.so", "LD_PRELOAD cannot be set: a process reads it when it starts"),
        ("actor.engine.env.HF_TOKEN=hf_0123456789abcdefghij", "actor.engine.env.HF_TOKEN holds a secret"),
        ("actor.engine.env.A=${NO_SUCH_VARIABLE}", "there is no environment variable NO_SUCH_VARIABLE"),
        ("actor.engine.env.A=true", "actor.engine.env.A"),
        ("actor.engine.env={1a: b}", "actor.engine.env"),
    ],
)
def test_a_variable_that_would_not_hold_is_refused(make: Callable[..., Plan], override: str, said: str):
    assert said in refusal(make, override)


def test_roles_of_the_same_processes_must_agree(make: Callable[..., Plan]):
    here, there = "actor.engine.env.NCCL_DEBUG=INFO", "rollout.engine.env.NCCL_DEBUG=WARN"
    said = refusal(make, here, there)
    assert "rollout.engine.env.NCCL_DEBUG is 'WARN' and actor.engine.env.NCCL_DEBUG is 'INFO'" in said
    make(here, there, "rollout.placement=separate")
    make(here, "rollout.engine.env.NCCL_DEBUG=INFO")
    make(here, "rollout.engine.env.NCCL_IB_HCA=mlx5")
    assert "an inline run has only this process" in refusal(make, here, "cluster.launcher=inline")
