"""Models by their names on the hub: fetched once by the real client, pinned, and refused in one line each."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hub_server import TOKEN, Hub, Repository, enginehouse

from enginehouse.cli.main import main
from enginehouse_rl.hub import snapshots
from enginehouse_testing.models import tiny_model

NAME = "acme/tiny"
REWARD = "def short(prompt, response, **columns):\n    return -float(len(response))\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a config that names a model of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "hub_scoring.py").write_text(REWARD)
    config = {
        "model": {"path": NAME},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
        "reward": {"function": "hub_scoring:short"},
        "rollout": {"samples_per_prompt": 2, "sampling": {"max_tokens": 4}},
        "train": {"steps": 1, "prompts_per_step": 2},
        "cluster": {"device": "cpu", "launcher": "inline"},
        "run": {"directory": "runs/one"},
    }
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(config))
    yield tmp_path
    sys.modules.pop("hub_scoring", None)


def test_a_model_by_name_is_fetched_pinned_and_trained(hub: Hub, here: Path):
    """The files that are needed are fetched once, what the run writes names the commit, and a token is nowhere."""
    commit = hub.add_model(
        NAME, tiny_model(), **{"onnx/model.onnx": b"x", "README.md": b"x", "consolidated.safetensors": b""}
    )
    done = enginehouse("train", "grpo.yaml", here=here, HF_TOKEN="hf_" + "secret" * 5)
    assert done.returncode == 0, done.stderr
    assert f"{NAME}@{commit[:12]}: Qwen3ForCausalLM" in done.stdout, done.stdout
    assert f"{NAME} at {commit}" in done.stdout
    fetched = hub.fetched()
    assert "model.safetensors" in fetched
    assert "config.json" in fetched
    assert len(fetched) == len(set(fetched))
    assert not {"onnx/model.onnx", "README.md", "consolidated.safetensors"} & {*fetched}
    run = here / "runs" / "one"
    entry = {"key": "model.path", "name": NAME, "revision": "main", "commit": commit}
    assert json.loads((run / "run.json").read_text())["hub"] == [entry]
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["path"] == f"{NAME}@{commit}"
    written = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in written if b"secretsecret" in path.read_bytes()]
    assert "secretsecret" not in done.stdout + done.stderr

    asked = len(hub.requests)
    again = enginehouse("plan", "runs/one/config.yaml", "run.directory=runs/two", here=here)
    assert again.returncode == 0, again.stderr
    assert hub.requests[asked:] == []  # a commit that is cached is asked of nobody


def refused(*words: str) -> str:
    """Return the one line by which a command refuses, with exit code 2."""
    done = CliRunner().invoke(main, [*words])
    assert done.exit_code == 2, (done.output, done.exception)
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    return line


def planned(*words: str) -> str:
    done = CliRunner().invoke(main, ["plan", "grpo.yaml", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_what_stands_in_the_way_is_said_in_a_line(hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch):
    commit = hub.add_model(NAME, tiny_model())
    planned()
    hub.models["acme/closed"] = Repository(gated=True)
    hub.add_model("acme/closed", tiny_model())

    said = refused("plan", "grpo.yaml", "model.path=acme/tinny")
    assert (
        f"model.path: acme/tinny is no local path, and the hub ({hub.endpoint}) has no public model acme/tinny" in said
    )
    assert "(the cache has acme/tiny)" in said
    assert "HF_TOKEN" in said
    assert "no token is set" in said
    said = refused("plan", "grpo.yaml", f"model.path={NAME}@v9")
    assert (
        f"the model {NAME} has no revision 'v9' on the hub. Available: main; cached revisions: main ({commit})" in said
    )
    said = refused("plan", "grpo.yaml", "reference.path=acme/closed", "algorithm.kl.coefficient=0.1")
    assert f"reference.path: the model acme/closed is gated: ask for access at {hub.endpoint}/acme/closed" in said
    gone = refused("plan", "grpo.yaml", f"model.path={NAME}@{'0' * 40}")
    assert f"has no revision '{'0' * 40}' on the hub; cached revisions: main ({commit})" in gone

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    snapshots._fetched.clear()
    hub.answers = 403
    assert f"model.path: the hub refuses {NAME}: 403 Forbidden" in refused("plan", "grpo.yaml", f"model.path={NAME}")
    hub.answers = None
    assert "acme/closed@" in planned("reference.path=acme/closed", "algorithm.kl.coefficient=0.1")


def test_of_weights_those_of_the_index_are_fetched(hub: Hub, here: Path):
    """Not the model's copies in other files; and of a cache without a listing, what is there is used."""
    hub.add_model(NAME, tiny_model())
    (files,) = hub.models[NAME].commits.values()
    weights = files["model.safetensors"]
    names = [name for name in json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")]) if "__" not in name]
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    rest = {name: content for name, content in files.items() if name != "model.safetensors"}
    hub.models[NAME].commit(
        {
            **rest,
            "model-1.safetensors": weights,
            "x.safetensors": b"x",
            "model.safetensors.index.json": json.dumps(index).encode(),
        }
    )
    planned()
    assert [file for file in hub.fetched() if "safetensors" in file] == [
        "model.safetensors.index.json",
        "model-1.safetensors",
    ]
    shutil.rmtree(next(here.glob("cache/hub/models--*/trees")))  # as an older client leaves it
    assert "HF_HUB_OFFLINE is set" in enginehouse("plan", "grpo.yaml", here=here, HF_HUB_OFFLINE="1").stdout


def test_weights_in_another_form_are_named_and_not_fetched(hub: Hub, here: Path):
    hub.models[NAME] = Repository()
    hub.models[NAME].commit({"config.json": b"{}", "pytorch_model.bin": b"weights", "tiny-q4.gguf": b"weights"})
    said = refused("plan", "grpo.yaml")
    others = "pytorch_model.bin, tiny-q4.gguf"
    assert f"{NAME} has no weights in safetensors, only {others}: load and save it" in said
    assert not {"pytorch_model.bin", "tiny-q4.gguf"} & {*hub.fetched()}


@pytest.mark.parametrize("how", ["offline", "unreachable", "busy"])
def test_without_the_hub_what_is_cached_is_used_and_said(
    hub: Hub,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
):
    commit = hub.add_model(NAME, tiny_model())
    planned()
    monkeypatch.setattr("enginehouse_rl.hub.snapshots._fetched", {})
    if how == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    elif how == "busy":
        hub.answers = 503
    else:
        hub.close()
    why = {"offline": "HF_HUB_OFFLINE is set", "busy": f"{hub.endpoint} answers 503"}.get(
        how, f"{hub.endpoint} cannot be reached"
    )
    said = planned()
    assert why in said
    assert f"{NAME} is taken to be the commit {commit[:12]}, which is cached" in said
    said = refused("plan", "grpo.yaml", "model.path=acme/other")
    assert "model.path: acme/other is no local path, and cannot be fetched from the hub: " + why in said
    assert "no revision is cached in " in said
    assert "`hf download acme/other`" in said
    said = refused("plan", "grpo.yaml", f"model.path={NAME}@v9")
    assert f"cached revisions: main ({commit})" in said
    next(here.glob("cache/hub/models--*/snapshots/*/model.safetensors")).unlink()
    monkeypatch.setattr("enginehouse_rl.hub.snapshots._fetched", {})
    assert f"cached revisions: main ({commit}), but only in part. Fetch it" in refused("plan", "grpo.yaml")


def test_what_is_here_is_a_path(hub: Hub, here: Path):
    """A path that exists, that looks like one, or whose directory is here is no name; a revision makes it one."""
    commit = hub.add_model("models/tiny", tiny_model())
    (here / "models").mkdir()
    for path in ("models/tiny", "./acme/tiny", "acme/tiny/", "a/b/c"):
        said = refused("plan", "grpo.yaml", f"model.path={path}")
        assert f"model.path: {path} does not exist" in said
    assert "for the hub, write models/tiny@main" in refused("plan", "grpo.yaml", "model.path=models/tiny")
    assert not hub.requests
    assert f"models/tiny@{commit[:12]}" in planned("model.path=models/tiny@main")
    shutil.copytree(tiny_model(), here / "models" / "tiny")
    asked = len(hub.requests)
    assert "models/tiny: Qwen3ForCausalLM" in planned("model.path=models/tiny")
    assert len(hub.requests) == asked


def test_a_run_goes_on_with_the_commit_that_it_began_with(hub: Hub, here: Path):
    first = hub.add_model(NAME, tiny_model())
    done = CliRunner().invoke(main, ["train", "grpo.yaml", "train.checkpoint_every=1"])
    assert done.exit_code == 0, (done.output, done.exception)
    second = hub.add_model(NAME, tiny_model(seed=1))
    snapshots._fetched.clear()
    hub.models[NAME].branches["v2"] = second
    said = refused("train", "grpo.yaml", "--resume", "train.steps=2", f"model.path={NAME}@v2")
    assert (
        f"--resume: model.path is {NAME}@v2, which is the commit {second[:12]}, but the run began with {first[:12]}"
        in said
    )
    for spelled in (NAME, f"{NAME}@main", f"{NAME}@{first}"):
        assert f"{NAME} at {first}" in planned("--resume", "train.steps=2", f"model.path={spelled}")
    done = CliRunner().invoke(main, ["train", "grpo.yaml", "--resume", "train.steps=2"])
    assert done.exit_code == 0, (done.output, done.exception)
    record = json.loads((here / "runs" / "one" / "run.json").read_text())
    assert record["hub"][0]["commit"] == first
    assert record["steps"] == 2
    assert f"{NAME} at {second}" in planned("run.directory=runs/two")


def test_an_evaluation_takes_a_name(hub: Hub, here: Path):
    commit = hub.add_model(NAME, tiny_model())
    words = ["data.validation=train.jsonl", "evaluation.max_prompts=2", "model.path=gone"]
    done = CliRunner().invoke(main, ["eval", "grpo.yaml", "--model", f"{NAME}@main", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    record = json.loads((here / "runs" / "eval-tiny" / "run.json").read_text())
    assert record["evaluated"]["model"] == f"{NAME}@{commit}"
    assert record["hub"][0]["key"] == "--model"
    assert refused("eval", "grpo.yaml", "--model", "acme/none").startswith("Error: --model: acme/none is no local path")


def test_a_cache_that_cannot_be_written_is_said(hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch):
    hub.add_model(NAME, tiny_model())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "train.jsonl" / "hub"))
    assert f"model.path: {NAME} cannot be written to {here}/train.jsonl/hub (Not a directory)" in refused(
        "plan", "grpo.yaml"
    )
