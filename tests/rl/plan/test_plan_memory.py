"""What `plan` says of memory, and refuses; the GPUs are pretended, and the model is a config without weights."""

import dataclasses
import json
import re
from collections.abc import Callable

import pytest
from click.testing import CliRunner
from projects import Project

from enginehouse.cli.main import main
from enginehouse.engines.memory import MemoryDemand, MemoryUse, ModelShape, server_memory
from enginehouse.errors import UserError
from enginehouse.plugin.findings import Findings
from enginehouse_rl.plan.device import Gpu, assume_gpus
from enginehouse_rl.plan.memory import PROCESS_BYTES, Needs
from enginehouse_rl.plan.plan import Plan

GIB = 2**30
SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
"""Qwen2.5-7B's."""
FSDP = ["actor.engine.backend=fsdp", "model.path=seven", "model.dtype=bfloat16"]


def both(processes: int) -> list[str]:
    return [f"actor.processes={processes}", f"rollout.replicas={processes}"]


@pytest.fixture
def on(project: Project, make: Callable[..., Plan]) -> Callable[..., Plan]:
    """Plans a 7B model on so many GPUs of 79 GiB."""
    project.make_model("seven", **SHAPE)
    project.config["cluster"]["device"] = "cuda"

    def on(number: int, *overrides: str) -> Plan:
        with assume_gpus(number, Gpu.from_kind("H100")):
            return make(*FSDP, *overrides)

    return on


def said(planned: Plan) -> str:
    return planned.render()


def test_what_a_gpu_cannot_hold_is_refused_with_what_takes_most(on):
    with pytest.raises(UserError, match=r"of 79\.0 GiB on each of 1 GPU, .*largest part: optimizer of the actor, 56\."):
        on(1)


def test_rows_are_as_long_as_the_longest_prompt_that_was_read(on, project: Project):
    (project.root / "games.py").write_text("class Game:\n    async def run(self, task, policy, context): ...\n")
    eight = [*both(8), "rollout.sampling.max_tokens=100", "data.max_prompt_tokens=200"]
    rows = map(json.loads, (project.root / "train.jsonl").read_text().splitlines())
    longest = max(len(row["prompt"]) for row in rows) + 8  # no tokenizer makes more of it
    bound = f"rows of at most {longest + 100} tokens: the longest prompt of the data, {longest}, and rollout.sampling"
    assert bound in said(on(8, *eight))
    assert "rows of at most 300 tokens: a prompt of data.max_prompt_tokens=200, and rollout" in said(
        on(8, *eight, "environment.name=games:Game")
    )
    project.write_rows("held_out.jsonl", [{"prompt": "1" * 60, "answer": "1"}])
    assert "the longest prompt of the data, 68," in said(on(8, *eight, "data.validation=held_out.jsonl"))


def test_what_it_can_is_planned_by_role(on):
    lines = said(on(8, *both(8))).splitlines()
    (heading,) = (line for line in lines if "GiB per rank" in line)
    columns = heading.split("GiB per rank")[1].split("  ")
    assert [name.strip() for name in columns if name.strip()][:2] == ["weights", "optimizer"]
    assert any("of 79.0 GiB on each of 8 GPUs" in line for line in lines)
    assert re.fullmatch(r"OK: [\d,]+ steps, at most \d+\.\d of 79\.0 GiB of each GPU", lines[0])
    assert any("estimates not checked against measurements: rollout" in line for line in lines)


def test_a_model_whose_shape_is_not_told_is_planned_without_amounts(on):
    assert "GiB" not in said(on(1, "model.path=model"))


USES = {
    "actor": MemoryUse(
        held={"weights": 4 * GIB, "optimizer": 8 * GIB}, working={"activations": 20 * GIB}, updating={"staging": GIB}
    ),
    "rollout": MemoryUse(held={"weights": 16 * GIB, "KV cache": 30 * GIB}, working={"logits": GIB}),
}


def sizes(planned: Plan) -> dict[str, int]:
    """GiB of each place, without what any process takes, by its roles."""
    found = Needs(planned.roles, USES, "cuda").places()
    guests = {place.roles: sum(PROCESS_BYTES for a in place.amounts if a.what == "CUDA and NCCL") for place in found}
    assert all(guests.values())
    return {
        "+".join(place.roles): sum(a.size for a in place.amounts if a.what != "CUDA and NCCL") // GIB for place in found
    }


def test_roles_of_one_process_hold_theirs_together_and_compute_in_turn(on):
    assert sizes(on(8, *both(8))) == {"actor+rollout": 4 + 8 + 16 + 30 + 20}


def test_roles_that_take_turns_need_what_the_larger_turn_does(on):
    assert sizes(on(8, *both(8), "rollout.placement=shared")) == {"actor+rollout": 16 + 30 + 1}


def test_what_an_engine_keeps_asleep_is_beside_the_others_turn(on, monkeypatch: pytest.MonkeyPatch):
    shared = on(8, *both(8), "rollout.placement=shared")
    larger = dataclasses.replace(USES["actor"], working={"activations": 50 * GIB})
    kept = dataclasses.replace(USES["rollout"], asleep=3 * GIB)
    monkeypatch.setitem(USES, "actor", larger)
    assert sizes(shared) == {"actor+rollout": 4 + 8 + 50}
    monkeypatch.setitem(USES, "rollout", kept)
    assert sizes(shared) == {"actor+rollout": 4 + 8 + 50 + 3}
    assert sizes(on(8, *both(8))) == {"actor+rollout": 4 + 8 + 16 + 30 + 50}, "nobody sleeps in one process"


@pytest.mark.parametrize(("gib", "limit", "fits"), [(75, None, True), (77, None, False), (77, 0.98, True)])
def test_some_of_a_gpu_is_left_free(on, gib: int, limit: float | None, fits: bool):
    """Of 79 GiB, 3 stay free, but where an engine was told the share it may take."""
    planned, findings = on(8, *both(4), "rollout.placement=separate"), Findings()
    uses = {
        "actor": MemoryUse(held={"weights": gib * GIB - PROCESS_BYTES}, limit=limit and int(limit * 79 * GIB)),
        "rollout": MemoryUse(held={}),
    }
    Needs(planned.roles, uses, "cuda", Gpu.from_kind("H100")).check(findings, exact=True)
    refused = [
        f"{gib}.0 of 79.0 GiB" in str(one) and "3.2 GiB of each GPU must stay free" in str(one)
        for one in findings.problems
    ]
    assert refused == ([] if fits else [True])


def test_roles_apart_are_alone(on):
    apart = [*both(4), "rollout.placement=separate"]
    assert sizes(on(8, *apart)) == {"actor": 32, "rollout": 47}


def demand(**given) -> MemoryDemand:
    shape = ModelShape.of(SHAPE)
    assert shape is not None
    default = {"itemsize": 2, "processes": 1, "rows": 64, "longest": 2048, "trained": False, "device": "cuda"}
    return MemoryDemand(shape=shape, **(default | given))


def test_a_server_fills_its_share_with_keys_and_values():
    use = server_memory(demand(card=80 * GIB), split=1, running=64, share=0.5, cache_mib=None, cpu_cache_mib=1024)
    assert sum((*use.held.values(), *use.working.values())) == 40 * GIB
    tokens = use.held["KV cache"] // (2 * 28 * 512 * 2)  # layers, keys of a token, bytes
    assert f"{tokens:,} tokens" in use.note


def test_a_suggestion_changes_what_costs_least_and_can_be_pasted(project: Project, on):
    project.write_tokenizer("seven")
    path = str(project.save())
    asked = ["plan", path, *FSDP, *both(4), "actor.engine.options.activation_checkpointing=false"]
    asked += ["rollout.sampling.max_tokens=4096", "train.prompts_per_step=40", "rollout.engine.options.max_running=8"]
    refused = CliRunner().invoke(main, [*asked, "--gpus", "4", "--gpu", "H100", "--suggest"])
    assert refused.exit_code == 2
    (pasted,) = (line.split() for line in refused.stdout.splitlines() if line.startswith("  actor."))
    assert "actor.engine.options.activation_checkpointing=true" in pasted
    assert CliRunner().invoke(main, [*asked, *pasted, "--gpus", "4", "--gpu", "H100"]).exit_code == 0


def test_a_kind_of_gpu_that_is_not_known_is_refused_with_those_there_are(project: Project):
    refused = CliRunner().invoke(main, ["plan", str(project.save()), "--gpu", "H10"])
    assert refused.exit_code == 2
    assert "H100" in refused.output


def test_on_a_cpu_each_process_has_its_libraries_too(on):
    planned = on(1, "cluster.device=cpu", "rollout.placement=separate", "model.dtype=float32")
    (actor, rollout) = Needs(planned.roles, USES, "cpu").places()
    assert [place.size / GIB for place in (actor, rollout)] == [32.75, 47.75]
    assert "each sum includes 0.8 GiB per process for libraries and freed memory (a guess)" in said(planned)


def test_quantized_blocks_leave_more_of_a_share_to_the_cache():
    given = {"split": 1, "running": 64, "share": 0.5, "cache_mib": None, "cpu_cache_mib": 1024}
    whole, quantized = (server_memory(demand(card=80 * GIB), **given, block_itemsize=size) for size in (None, 1))
    shape = demand().shape
    assert whole.held["weights"] - quantized.held["weights"] == shape.layers * shape.block_parameters
    assert quantized.held["KV cache"] - whole.held["KV cache"] == shape.layers * shape.block_parameters


def test_copies_of_the_weights_that_a_transport_keeps_count_as_host_memory(on):
    overrides = [*both(2), "rollout.placement=separate", "rollout.engine.backend=torch"]
    weights = 15.2e9 / GIB
    copies = {"differences": {"actor": weights / 2, "rollout": 2 * weights}, "point_to_point": {}}
    for transport, expected in copies.items():
        lines = said(on(4, *overrides, f"weights.transport={transport}"))
        counted = dict(re.findall(r"(actor|rollout): ([\d.]+) GiB of host memory per GPU", lines))
        assert {role: float(size) for role, size in counted.items()} == {
            role: pytest.approx(size, abs=0.1) for role, size in expected.items()
        }


def test_copies_that_a_transport_keeps_count_in_a_run_on_cpus(project, make):
    def total(transport: str) -> float:
        separate = ["rollout.placement=separate", "rollout.engine.backend=torch", f"weights.transport={transport}"]
        found = re.search(r"about ([\d.]+) GiB of memory", said(make("model.path=seven", *separate)))
        assert found
        return float(found[1])

    project.make_model("seven", **SHAPE)
    assert total("differences") - total("point_to_point") == pytest.approx(3 * 4 * 7.6e9 / GIB, rel=0.02)
