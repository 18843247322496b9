"""Models by their names on the hub: fetched once by the real client, pinned, and refused in one line each."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hub_server import Hub, enginehouse, hub  # noqa: F401 - a fixture

from enginehouse.cli.main import main
from enginehouse_testing.models import tiny_model

NAME = "acme/tiny"
REWARD = "def short(prompt, response, **columns):\n    return -float(len(response))\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a config that names a model of the hub."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "scoring.py").write_text(REWARD)
    config = {
        "model": {"path": NAME},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
        "reward": {"function": "scoring:short"},
        "rollout": {"samples_per_prompt": 2, "sampling": {"max_tokens": 4}},
        "train": {"steps": 1, "prompts_per_step": 2},
        "cluster": {"device": "cpu", "launcher": "inline"},
        "run": {"directory": "runs/one"},
    }
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def test_a_model_by_name_is_fetched_pinned_and_trained(hub: Hub, here: Path):  # noqa: F811
    """The files that are needed are fetched once, what the run writes names the commit, and a token is nowhere."""
    commit = hub.add_model(NAME, tiny_model(), **{"onnx/model.onnx": b"x", "README.md": b"x", "consolidated.safetensors": b""})
    done = enginehouse("train", "grpo.yaml", here=here, HF_TOKEN="hf_" + "secret" * 5)
    assert done.returncode == 0, done.stderr
    assert f"{NAME}@{commit[:12]}: Qwen3ForCausalLM" in done.stdout, done.stdout
    assert f"{NAME} at {commit}" in done.stdout
    fetched = hub.fetched()
    assert "model.safetensors" in fetched and "config.json" in fetched and len(fetched) == len(set(fetched))
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
    assert len(hub.requests) == asked  # a commit that is cached is asked of nobody
