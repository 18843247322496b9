"""`make test-gpu`: what it writes, and when it says that all is well. Its steps need a GPU, but for small ones."""

import json
import os
import shlex
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import packed_attention
import pytest
import torch
from click.testing import CliRunner
from projects import Project, project  # noqa: F401 - a fixture
from tools.gpu import __main__ as gpu
from tools.gpu import kernels, wheels
from tools.gpu.running import commands, run_all
from tools.gpu.steps import LARGE, SMALL, TASK, WORK, Step, last_metrics, steps
from torch.optim import AdamW

from enginehouse.cli.main import main
from enginehouse.weights.checksums import checksum
from enginehouse_torch.modeling import sharing
from enginehouse_torch.served_weights import ServedWeights


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    WORK.mkdir(parents=True)


def written(*chosen: Step, minutes: float = 1.0, **options: bool) -> tuple[bool, dict[str, dict[str, object]]]:
    path = Path("results/some-gpu.json")
    passed = run_all(chosen, {"device": "Some GPU"}, path, minutes, **options)
    content = json.loads(path.read_text())
    assert content["device"] == "Some GPU"
    return passed, content["steps"]


def test_figures_decide_where_a_command_ends_well():
    def reading(value: float) -> Step:
        return Step("read", "true", 10, (), lambda: {"speed": value}, least={"speed": 0.95}, most={"speed": 1.05})

    passed, rows = written(reading(1.0))
    assert passed
    assert rows["read"]["figures"] == {"speed": 1.0}
    for wrong, said in ((0.9, "speed is 0.9, not at least 0.95"), (1.1, "not at most 1.05"), (float("nan"), "nan")):
        passed, rows = written(reading(wrong))
        assert not passed
        assert said in rows["read"]["problems"][0]
    passed, rows = written(Step("read", "true", 10, (), dict, least={"speed": 0.95}))
    assert rows["read"]["problems"] == ["speed is None, not at least 0.95"]


def test_what_fails_hangs_or_leaves_nothing_is_said_and_the_rest_is_run():
    passed, rows = written(
        Step("fails", "echo why; exit 3", 10),
        Step("hangs", "sleep 60 & sleep 60", 0.2),
        Step("leaves nothing", "true", 10, (), lambda: last_metrics(Path("nowhere"), [])),
        Step("works", "enginehouse --help", 30),
    )
    assert not passed
    assert rows["fails"]["exit_code"] == 3
    assert "why" in str(rows["fails"]["end_of_output"])
    assert rows["hangs"]["problems"] == ["it was ended after 0 s"]
    assert "its figures cannot be read: FileNotFoundError" in str(rows["leaves nothing"]["problems"])
    assert rows["works"]["passed"]


def test_what_there_is_no_time_for_is_said_not_to_have_run():
    passed, rows = written(Step("late", "true", 10), minutes=0.1)
    assert not passed
    assert rows["late"]["problems"] == ["not run: no time was left"]


def test_what_is_not_here_is_not_run_and_only_a_bare_machine_may_lack_it():
    lacking, there = Step("lacking", "true", 10, needs=("no_such_engine",)), Step("there", "true", 10)
    passed, rows = written(lacking, there)
    assert not passed
    assert rows["lacking"]["problems"] == ["not run: no_such_engine is not here"]
    passed, rows = written(lacking, there, bare=True)
    assert passed
    assert rows["lacking"]["passed"] is None
    assert not written(lacking, bare=True)[0], "nothing was run"


def test_limits_add_up_to_what_is_given():
    assert sum(step.seconds for step in steps()) <= gpu.MINUTES * 60
    bare = [step for step in steps() if not {"vllm", "sglang"} & set(step.needs)]
    assert sum(step.seconds for step in bare) <= 30 * 60
    assert all(step.seconds <= 240 for step in steps()), "several fit into the ten minutes a command may take"


def test_every_step_says_what_it_needs():
    for step in steps():
        engines = {name for name in ("vllm", "sglang") if name in step.command.replace("shared", "")}
        assert engines <= set(step.needs), step.name
        trains = step.command.startswith("enginehouse") and "cluster.launcher=inline" not in step.command
        assert not trains or "ray" in step.needs, step.name


def test_commands_are_found_in_what_pip_made_of_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "site" / "bin" / "enginehouse"
    program.parent.mkdir(parents=True)
    program.touch()
    assert str(program.parent) not in commands().split(os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert str(program.parent) in commands().split(os.pathsep)


def test_what_no_run_uses_is_taken_out_of_a_wheel_and_out_of_its_record(tmp_path: Path):
    files = {"ray/_raylet.so": b"x" * 10, "ray/jars/ray_dist.jar": b"y" * 10, "ray-1.dist-info/METADATA": b"Name: ray"}
    record = "ray-1.dist-info/RECORD"
    digests = {
        name: urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode() for name, content in files.items()
    }
    rows = [f"{name},sha256={digests[name]},{len(content)}\n" for name, content in files.items()]
    wheel = tmp_path / "ray-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**files, record: "".join([*rows, f"{record},,\n"]).encode()}.items():
            archive.writestr(name, content)
    wheels.check(wheel)
    wheels.strip(wheel)
    wheels.check(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == {"ray/_raylet.so", "ray-1.dist-info/METADATA", record}
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("ray/more.py", "")
    with pytest.raises(ValueError, match="names other files than it has"):
        wheels.check(wheel)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gpu, "interpreters", dict)
    assert gpu.main([]) == 2
    assert "no GPU that torch can use is visible here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [step.name for step in steps() if f"{TASK}/train.jsonl" in step.command and not step.skipped]
)
def test_the_runs_it_makes_can_start_on_one_gpu(name: str, project: Project, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.setenv("ENGINEHOUSE_RUNTIMES", "runtimes")
    shape = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    }  # fmt: skip
    project.make_model(str(LARGE.model), **shape)
    project.write_tokenizer(str(LARGE.model))
    TASK.mkdir()
    (TASK / "train.jsonl").write_bytes((project.root / "train.jsonl").read_bytes())
    (step,) = [step for step in steps() if step.name == name]
    _, _, config, *overrides = shlex.split(step.command.partition(" --")[0])
    asked = ["plan", str(gpu.ROOT / config), *overrides, "--gpus", "1", "--gpu", "H100"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    assert ("taking turns with the actor" in result.output) is (name not in ("in one process", "long passes"))


def test_nothing_that_is_written_names_a_place_of_the_machine():
    for step in steps():
        assert not any(word.startswith("/") or "=/" in word for word in shlex.split(step.command)), step.command


@pytest.fixture
def rehearsed() -> Callable[[], list[str]]:
    """Return what the rehearsal of "in one process" has to say against the run, in this process."""
    for folder in ("tools", "examples"):
        Path(folder).symlink_to(gpu.ROOT / folder)
    gpu.prepare(SMALL)
    (step,) = [step for step in steps(SMALL) if step.name == "in one process"]

    def run() -> list[str]:
        result = CliRunner().invoke(main, shlex.split(step.command)[1:])
        return step.problems(step.figures()) if result.exit_code == 0 else [f"exit code {result.exit_code}"]

    return run


def _nothing_stepped(self: AdamW, closure: object = None) -> None:
    """No parameter moves."""


def _upwards(self: AdamW, closure: object = None) -> None:
    for group in self.param_groups:
        group["lr"] = -group["lr"]
    STEP(self)


def _one_gradient_lost(self: AdamW, closure: object = None) -> None:
    self.param_groups[0]["weight_decay"] = 0.0
    self.param_groups[0]["params"][1].grad.zero_()
    STEP(self)


def _kept(self: ServedWeights, version: int) -> None:
    """The version and checksums are the new weights', which are not taken."""
    staged = self._complete(version)
    self._checksums = {name: checksum(tensor) for name, tensor in staged.arrived.items()}
    self.version, self.is_lost = version, False
    self.discard()


STEP = AdamW.step
MUTANTS = {
    "optimizer does nothing": (AdamW, "step", _nothing_stepped, "weights/changed is 0"),
    "optimizer goes up": (AdamW, "step", _upwards, "loss/mean is 0.0"),
    "a matrix gets no gradient": (AdamW, "step", _one_gradient_lost, "weights/changed is 0.9"),
    "update carries nothing": (ServedWeights, "commit", _kept, "exit code 1"),
}


@pytest.mark.slow
def test_the_rehearsal_fails_where_a_backward_pass_or_an_update_is_wrong(rehearsed, monkeypatch: pytest.MonkeyPatch):
    assert rehearsed() == []
    for name, (owner, method, wrong, said) in MUTANTS.items():
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, wrong)
            problems = rehearsed()
        assert any(problem.startswith(said) for problem in problems), f"{name}: {problems}"


@pytest.mark.slow
def test_the_rehearsal_fails_where_rows_see_each_other(monkeypatch: pytest.MonkeyPatch):
    (step,) = [step for step in steps(SMALL) if step.name == "kernels"]

    def found() -> dict[str, float]:
        with packed_attention.stand_ins():
            return kernels.compare(torch.device("cpu"), [32], [70])

    assert step.problems(found()) == []

    def mixed_up(query, key, value, ends, longest, scale):
        return exact(query, key, value, torch.tensor([0, len(query)], dtype=torch.int32), len(query), scale)

    exact = packed_attention.varlen
    monkeypatch.setattr(packed_attention, "varlen", mixed_up)
    monkeypatch.setattr(sharing, "_probe", lambda *given: (0.0, 1.0))  # which would have the rows padded instead
    assert any(problem.startswith("gradients/float32 is") for problem in step.problems(found()))


@pytest.mark.slow
def test_the_tests_for_a_bare_machine_are_collected_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(gpu.ROOT)
    (step,) = [step for step in steps(SMALL) if step.name == "tests"]
    _, *arguments = shlex.split(step.command)
    asked = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert asked.returncode == 0, asked.stdout
