"""`enginehouse parity` as a user starts it: engines in processes of their own, and weights that travel between them."""

import json
from pathlib import Path

import pytest

from .conftest import Start

pytestmark = pytest.mark.slow


def test_two_ranks_of_fsdp_and_a_replica_of_torch_agree_and_are_gone_afterwards(start: Start, house: Path):
    run = start(
        "parity",
        "--train=fsdp",
        "--rollout=torch",
        "--prompts=8",
        "--out=found/parity",
        "model.path=examples/quickstart/work/model",
        "actor.processes=2",
        "rollout.placement=separate",
        "rollout.sampling.temperature=0.7",
    )
    ended = run.finished()  # also: that no process is left
    assert "fsdp x2" in ended.out
    assert "by shared_memory, float32; samples at temperature 0.7" in ended.out
    written = json.loads((house / "found" / "parity" / "parity.json").read_text())
    assert written["passed"]
    assert written["found"]["sequences"] == 64
    assert 0 < written["found"]["mean"] < 1e-5
    assert len(written["roles"]["actor"]) == 2
    assert not run.directory.exists()


def test_engines_that_take_turns_on_the_same_devices_agree(start: Start):
    model = "model.path=examples/quickstart/work/model"
    ended = start("parity", "--train=fsdp", "--prompts=4", model, "rollout.placement=shared").finished()
    assert "by shared_memory, float32" in ended.out


def test_a_worker_that_cannot_start_is_the_users_mistake_where_it_is_one(start: Start, house: Path):
    broken = house / "broken-model"
    broken.mkdir()
    for file in (house / "examples" / "quickstart" / "work" / "model").iterdir():
        (broken / file.name).write_bytes(b"{" if file.name == "model.safetensors" else file.read_bytes())
    ended = start("parity", "model.path=broken-model").finish()
    assert ended.code == 2, ended.err
    assert "broken-model" in ended.err
    assert "Traceback" not in ended.err
