"""Planning a reference: on the actor's processes and with its engine, or on an engine or processes of its own."""

import sys
from collections.abc import Callable

import pytest
from projects import Project, refusal

from enginehouse_rl.plan.plan import Plan

KL = "algorithm.kl.coefficient=0.1"
LORA = ("actor.engine.backend=fsdp", "actor.engine.options.lora.rank=4")


def test_a_reference_shares_the_actors_processes_and_its_engine(make: Callable[..., Plan]):
    planned = make(KL, "actor.processes=2", "actor.engine.options.lr=1e-4")
    actor, reference = planned.roles["actor"], planned.roles["reference"]
    assert (reference.shares, reference.trained) == ("actor", False)
    assert (reference.backend, reference.options) == (actor.backend, actor.options)
    assert (reference.model, reference.processes) == (actor.model, actor.processes)


def test_a_reference_on_an_engine_of_its_own_has_processes_of_its_own(make: Callable[..., Plan], project: Project):
    other = project.make_model("other")
    fsdp = ("reference.engine.backend=fsdp", "reference.engine.options.tensor_parallel=2", "reference.path=other")
    planned = make(KL, *fsdp, "reference.processes=2")
    reference = planned.roles["reference"]
    assert (reference.backend, reference.shares, reference.processes) == ("fsdp", None, 2)
    assert (reference.model.path, reference.options["tensor_parallel"]) == (str(other), 2)
    facts = dict(planned.facts)
    assert facts["reference"] == (
        "other: fsdp (tensor_parallel=2), 2 ranks, in separate processes; 0.1 times the k3 divergence in the loss"
    )
    assert "runtimes" not in facts
    assert set(planned.distributions) == {"enginehouse-torch", "enginehouse-fsdp"}
    assert make(KL, *fsdp, "actor.processes=4").roles["reference"].processes == 4, "as many as the actor's"


def test_a_reference_that_is_given_processes_has_them_beside_the_actors(make: Callable[..., Plan]):
    planned = make(KL, "reference.processes=2", "actor.engine.options.lr=1e-4")
    reference = planned.roles["reference"]
    assert (reference.backend, reference.shares, reference.processes) == ("torch", None, 2)
    assert reference.options == planned.roles["actor"].options
    assert dict(planned.facts)["reference"].startswith(
        "model: torch with the actor's options, 2 ranks, in separate processes; 0.1 times"
    )


def test_a_rate_that_bfloat16_rounds_away_is_noted_for_adapters(make: Callable[..., Plan]):
    def notes(*overrides: str) -> list[str]:
        return [note for note in make(*LORA, *overrides).notes if "for adapters in bfloat16" in note]

    (note,) = notes("model.dtype=bfloat16")
    assert note.startswith("actor.engine.options.lr is 1e-06, for adapters in bfloat16")
    assert notes("model.dtype=float32") == []
    assert notes("model.dtype=bfloat16", "actor.engine.options.lr=1e-4") == []


def test_a_runtime_of_its_own_is_an_engine_of_its_own(make: Callable[..., Plan]):
    reference = make(KL, f"reference.engine.runtime={sys.executable}").roles["reference"]
    assert (reference.interpreter.python, reference.shares) == (sys.executable, None)


def test_adapters_are_compared_with_their_base_where_nothing_is_said_of_a_reference(make: Callable[..., Plan]):
    assert "reference" not in make(KL, *LORA).roles
    for said in ("reference.processes=1", "reference.engine.backend=torch", "reference.path=model"):
        assert make(KL, *LORA, said).roles["reference"].model.path.endswith("/model")


def test_the_schedule_of_a_reference_has_the_length_of_the_run(make: Callable[..., Plan]):
    options = "reference.engine.options={schedule: cosine}"
    assert make(KL, options, "algorithm.epochs=3").roles["reference"].options["total_steps"] == 30


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["reference.engine.backend=fdsp"], "reference.engine.backend: "),
        (["reference.engine.backend=fsdp", "reference.engine.options.replica=2"], "'reference.engine.options.replica'"),
        (
            ["reference.engine.backend=fsdp", "reference.engine.options.tensor_parallel=2", "reference.processes=3"],
            "reference.engine.options: fsdp: tensor_parallel=2 does not divide the 3 rank(s)",
        ),
        (
            ["actor.engine.backend=fsdp", "actor.processes=2", "actor.engine.options.tensor_parallel=2",
             "reference.processes=3"],
            "reference.processes is 3: fsdp: tensor_parallel=2 does not divide the 3 rank(s)",
        ),
        (["reference.engine.runtime=nowhere"], "reference.engine.runtime: no runtime 'nowhere'"),
        (["reference.processes=33"], "fewer than the 33 processes of the reference (reference.processes)"),
        (["reference.processes=1", "cluster.launcher=inline"], "reference.processes: the reference needs its own"),
        (["reference.engine.backend=torch", "cluster.launcher=inline"], "reference.engine: the reference needs"),
    ],
)  # fmt: skip
def test_a_reference_that_cannot_be_is_refused(make: Callable[..., Plan], overrides: list[str], said: str):
    assert said in refusal(make, KL, *overrides)


def test_a_reference_in_the_actors_processes_runs_in_their_runtime(make: Callable[..., Plan]):
    other = f"reference.engine={{backend: torch, runtime: {sys.executable}}}"
    said = f"reference.shares is actor, which runs in current, but reference needs {sys.executable}: a process has"
    assert said in refusal(make, KL, other, "reference.shares=actor")


def test_the_model_of_a_reference_is_checked_by_its_own_engine(make: Callable[..., Plan], project: Project):
    project.make_model("odd", model_type="qwen3", num_attention_heads=3, num_key_value_heads=3)
    fsdp = ("reference.engine.backend=fsdp", "reference.engine.options.tensor_parallel=2", "reference.processes=2")
    assert "reference.engine.options, reference.path: " in refusal(make, KL, *fsdp, "reference.path=odd")


def test_a_reference_counts_among_the_gpus_and_threads(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("enginehouse_rl.plan.parts.placement.visible_gpus", lambda: 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert "the run needs 3 GPUs (actor 1, reference 2), but only 2 are visible" in refusal(
        make, KL, "cluster.device=cuda", "reference.processes=2"
    )
    assert any("have 3 threads in 3 processes" in note for note in make(KL, "reference.processes=2").notes)


@pytest.mark.parametrize("said", ["reference.processes=2", "reference.engine.backend=torch", "reference.path=model"])
def test_a_reference_without_a_kl_term_is_noted(make: Callable[..., Plan], said: str):
    planned = make(said)
    key = ".".join(said.partition("=")[0].split(".")[:2])
    assert f"{key} is set, but algorithm.kl.coefficient is 0: no reference model runs" in planned.notes
    assert "reference" not in planned.roles
