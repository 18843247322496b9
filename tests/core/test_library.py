"""The library: engines by name become roles that are placed and connected, and what cannot be is refused first."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from enginehouse import library
from enginehouse.engines.options import LoraOptions
from enginehouse.errors import UserError
from enginehouse.library import Engine, Launch, LossSpec, ModelSpec, SamplingParams, start_engines
from enginehouse.roles.role_plan import RolePlan

INLINE = Launch(launcher="inline")
TORCH = Engine("torch")
LORA = Engine("fsdp", {"lora": {"rank": 16}})
ADAPTED = ModelSpec("model", adapter=LoraOptions())
ADDING = Engine("vllm", model=ADAPTED)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of examples/loop, by its name."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "loop")
    return importlib.import_module


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> dict[str, RolePlan]:
    """What would be placed: nothing is started."""
    roles: dict[str, RolePlan] = {}

    @contextmanager
    def place(planned: Mapping[str, RolePlan], *how: Any) -> Iterator[None]:
        roles.update(planned)
        yield

    monkeypatch.setattr(library, "place", place)
    return roles


def test_a_step_draws_trains_and_serves_what_was_trained(example: Any, tmp_path: Path):
    warm_up: ModuleType = example("warm_up")
    tokenizer = warm_up.make_model(tmp_path)
    with start_engines(str(tmp_path), actor=Engine("torch", {"lr": 0.01}), rollout=TORCH, launch=INLINE) as roles:
        roles.sync.publish(1)
        prompts = tokenizer(["s123456=", "s65="]).input_ids
        batch = roles.rollout.draw(prompts, SamplingParams(max_tokens=3, n=2, ignore_eos=True), seed=1)
        assert [row.tolist() for row in batch["input_ids"]][::2] != prompts
        assert [row[: len(prompts[i // 2])].tolist() for i, row in enumerate(batch["input_ids"])] == [
            *[prompts[0]] * 2,
            *[prompts[1]] * 2,
        ]
        assert [int(mask.sum()) for mask in batch["loss_mask"]] == [3] * 4
        before = roles.actor.forward(batch, library.Outputs())["logprobs"].values.sum()
        figures = roles.actor.update(batch.with_columns(advantages=torch.ones(4)), LossSpec("grpo:clipped_policy"))
        assert figures["loss"].value == pytest.approx(-1.0, abs=1e-4)  # the ratio is 1 before the first update
        report = roles.sync.publish(2)
        assert (report.version, report.effect is not None) == (2, True)
        assert roles.actor.forward(batch, library.Outputs())["logprobs"].values.sum() > before
        assert set(roles.rollout.draw(prompts, SamplingParams(max_tokens=1))["weight_version"].tolist()) == {2}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"actor": Engine("trch")}, r"unknown training engine 'trch'. Did you mean 'torch'\?"),
        ({"rollout": Engine("trch")}, r"unknown rollout engine 'trch'. Did you mean 'torch'\?"),
        (
            {"actor": Engine("torch", {"lrr": 1})},
            r"^actor: options of engine 'torch': unknown option 'lrr'. Did you mean 'lr'\?",
        ),
        ({"actor": Engine("torch", {"lr": -1})}, r"^actor: options of engine 'torch': lr: .* greater than 0"),
        ({"rollout": Engine("torch", {"native": {"a": 1}})}, r"^rollout: options of engine 'torch': native: "),
        ({"transport": "inprc"}, r"unknown weight transport 'inprc'. Did you mean 'inproc'\?"),
        ({"rollout": Engine("torch", processes=2), "placement": "colocated"}, "has 2 processes, but the actor has 1"),
        ({"placement": "shared", "launch": INLINE}, "an inline run has one process"),
        ({"placement": "colocatd"}, r"unknown placement 'colocatd'. Did you mean 'colocated'\?"),
        ({"rollout": Engine("torch", model=ADAPTED)}, "engine 'torch' lacks the capability 'adapter_updates'"),
        ({"actor": LORA, "rollout": ADDING, "placement": "shared"}, "with placement 'shared' it needs whole weights"),
        ({"actor": Engine("fsdp"), "rollout": ADDING}, "but the actor trains None"),
        ({"actor": Engine("fsdp", {"lora": {"alpha": 1.0}}), "rollout": ADDING}, "but the actor trains .*'alpha': 1.0"),
        (
            {"actor": Engine("fsdp", LORA.options, model=ModelSpec("other")), "rollout": ADDING},
            "is for 'other', not for",
        ),
        ({"critic": Engine("torch", shares="actr")}, r"critic: no role 'actr'.* Did you mean 'actor'\?"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(
    placed: dict[str, RolePlan], roles: dict[str, Any], message: str
):
    with pytest.raises(UserError, match=message), start_engines("model", **{"actor": TORCH, "rollout": TORCH, **roles}):
        pass
    assert not placed


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ({}, ("actor", None, "inproc")),
        ({"placement": "separate"}, (None, None, "shared_memory")),
        ({"placement": "shared"}, (None, "actor", "shared_memory")),
        ({"rollout": Engine("torch", processes=2)}, (None, None, "shared_memory")),
        ({"launch": Launch(address="elsewhere"), "placement": "separate"}, (None, None, "collective")),
        ({"launch": INLINE, "placement": "separate"}, (None, None, "inproc")),
        ({"placement": "separate", "transport": "collective"}, (None, None, "collective")),
    ],
)
def test_the_rollout_lives_with_the_actor_where_it_can(
    placed: dict[str, RolePlan], how: dict[str, Any], place: tuple[str | None, str | None, str]
):
    with start_engines("model", **{"actor": TORCH, "rollout": TORCH, **how}):
        rollout = placed["rollout"]
    assert (rollout.shares, rollout.devices_of, rollout.transport) == place
    assert rollout.model == placed["actor"].model == ModelSpec("model")


def test_further_roles_have_models_and_processes_of_their_own(placed: dict[str, RolePlan]):
    values = ModelSpec("values", head="value")
    with start_engines("model", actor=TORCH, critic=Engine("torch", model=values, shares="actor"), reference=TORCH):
        assert {name: (role.kind, role.model.path, role.shares) for name, role in placed.items()} == {
            "actor": ("train", "model", None),
            "critic": ("train", "values", "actor"),
            "reference": ("train", "model", None),
        }
