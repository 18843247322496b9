"""What the device decides where the config leaves it open; the GPUs are pretended."""

from collections.abc import Callable

import pytest
from projects import Project, refusal

from enginehouse.plugin import load_plugins
from enginehouse_rl.config.load import load_config
from enginehouse_rl.plan.device import cpu_has_bfloat16
from enginehouse_rl.plan.plan import Plan, plan

FSDP = "actor.engine.backend=fsdp"
CHECKPOINTING = "actor.engine.options.activation_checkpointing"


@pytest.fixture
def make(project: Project) -> Callable[..., Plan]:
    plugins = load_plugins(enabled=("torch", "fsdp", "megatron", "sglang"))

    def make(device: str, *overrides: str) -> Plan:
        address = ["cluster.address=elsewhere"] if device == "cuda" else []  # whose GPUs are not counted
        return plan(load_config(project.save(), [f"cluster.device={device}", *address, *overrides]), plugins)

    return make


@pytest.mark.parametrize(
    ("device", "said", "dtype"),
    [
        ("cpu", "auto", "float32"),
        ("cuda", "auto", "bfloat16"),
        ("cpu", "bfloat16", "bfloat16"),
        ("cuda", "float32", "float32"),
    ],
)
def test_every_role_computes_in_the_devices_dtype_unless_one_is_named(make, device, said, dtype):
    planned = make(device, f"model.dtype={said}", "algorithm.kl.coefficient=0.1")
    assert {name: role.model.dtype for name, role in planned.roles.items()} == dict.fromkeys(
        ("actor", "reference", "rollout"), dtype
    )
    assert f"Qwen3ForCausalLM in {dtype}{' (model.dtype is auto' if said == 'auto' else ''}" in planned.render()


@pytest.mark.parametrize(
    ("device", "overrides", "kept"),
    [("cpu", [], False), ("cuda", [], True), ("cuda", [f"{CHECKPOINTING}=false"], False)],
)
def test_activations_are_computed_again_on_gpus_unless_that_is_said(make, device, overrides, kept):
    actor = make(device, FSDP, *overrides).roles["actor"]
    assert actor.options["activation_checkpointing"] is kept
    recompute = make(device, "actor.engine.backend=megatron").roles["actor"].options["recompute"]
    assert recompute == ("full" if device == "cuda" else "none")


def test_a_dtype_that_an_engine_does_not_compute_in_there_is_refused(make: Callable[..., Plan]):
    sglang = ["rollout.engine.backend=sglang", "model.dtype=float32", "rollout.engine.options.deterministic=true"]
    said = refusal(make, "cuda", *sglang)
    assert "rollout.engine.options: deterministic: SGLang's deterministic inference" in said
    assert "set model.dtype=bfloat16 or deterministic=false" in said


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("flags\t\t: fpu avx2 fma\n", False),
        ("processor: 0\nflags\t\t: fpu avx512_bf16\nflags: fpu avx2\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("nothing of it\n", True),
        (None, True),
    ],
)
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_noted(make, tmp_path, monkeypatch, cpuinfo, has):
    place = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        place.write_text(cpuinfo)
    assert cpu_has_bfloat16(place) == has
    monkeypatch.setattr("enginehouse_rl.plan.parts.draft.cpu_has_bfloat16", lambda: has)
    noted = [note for note in make("cpu", "model.dtype=bfloat16").notes if "5 to 8 times slower" in note]
    assert len(noted) == (not has)
    assert not [note for note in make("cpu").notes if "5 to 8 times slower" in note]
