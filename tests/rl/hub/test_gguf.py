"""Models in GGUF: made a directory once, with the very weights and tokens of the file, or refused in one line."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from gguf_models import BASE, HEADS, HIDDEN, rounded, tiny_llama, write_gguf
from hub_server import Hub, Repository
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from enginehouse.cli.main import main
from enginehouse.errors import ModelError
from enginehouse_rl.config.load import load_config
from enginehouse_rl.hub import gguf as made
from enginehouse_rl.hub.names import HubName
from enginehouse_rl.plan.plan import plan
from enginehouse_testing.models import tiny_model

TEXT = "the <|im_start|>13 + 29<|im_end|>\n  été <pad>"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a config whose model is `tiny.gguf`, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cached"))
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": "tiny.gguf"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 64},
        "reward": {"function": "numeric"},
        "rollout": {"samples_per_prompt": 2, "sampling": {"max_tokens": 4}},
        "train": {"steps": 1, "prompts_per_step": 2},
        "cluster": {"device": "cpu", "launcher": "inline"},
        "run": {"directory": "runs/one"},
    }
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def planned_model(path: str) -> Path:
    """Return the directory that the actor and the rollout of a plan begin from."""
    roles = plan(load_config("grpo.yaml", [f"model.path={path}", "run.directory=runs/planned"])).roles
    assert roles["actor"].model.path == roles["rollout"].model.path
    return Path(roles["actor"].model.path)


def logprobs(model: Path) -> torch.Tensor:
    rows = torch.arange(40).reshape(2, 20) * 5
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(rows).logits
    return torch.log_softmax(logits, -1)


def refused(*words: str) -> str:
    """Return the one line by which a command refuses, with exit code 2."""
    done = CliRunner().invoke(main, [*words])
    assert done.exit_code == 2, (done.output, done.exception)
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    return line


@pytest.mark.parametrize(("kind", "tied"), [("F32", True), ("F32", False), ("F16", True), ("Q8_0", True)])
def test_a_path_a_directory_and_a_name_have_the_weights_of_the_file(hub: Hub, here: Path, kind: str, tied: bool):
    """They are those of the model in safetensors, rounded as the package `gguf` rounds them, and so are logprobs."""
    whole = shutil.copytree(tiny_llama(tied), here / "whole")
    weights = {name: rounded(tensor, kind) for name, tensor in load_file(whole / "model.safetensors").items()}
    save_file({name: torch.tensor(tensor) for name, tensor in weights.items()}, whole / "model.safetensors")
    file = write_gguf(here / "tiny.gguf", tiny_llama(tied), kind)
    (here / "alone").mkdir()
    shutil.copyfile(file, here / "alone" / f"tiny-{kind}.gguf")
    hub.models["acme/tiny-GGUF"] = Repository()
    hub.models["acme/tiny-GGUF"].commit({f"tiny-{kind}.gguf": file.read_bytes(), "README.md": b"x"})
    hub.add_model("acme/tiny", whole)

    directory = planned_model("tiny.gguf")
    stored = load_file(directory / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(np.array_equal(stored[name], weights[name]) for name in weights)
    for path in ("alone", "acme/tiny-GGUF", f"acme/tiny-GGUF@main:tiny-{kind}.gguf"):
        assert planned_model(path) == directory
    expected = logprobs(planned_model("whole"))
    assert torch.equal(logprobs(planned_model("acme/tiny")), expected)
    assert (logprobs(directory) - expected).abs().max() <= 1e-6


def test_the_scaled_rotary_frequencies_of_llama_3_are_read(here: Path):
    """A file has the divisors alone; `transformers` says of the parameters what they do to frequencies."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    whole = shutil.copytree(tiny_llama(), here / "whole")
    config = AutoConfig.from_pretrained(whole)
    plain = 1 / BASE ** (np.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS))
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": BASE, "factor": 8.0, **scaling}
    config.save_pretrained(whole)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    divisors = (plain / scaled.numpy()).astype("float32")
    assert len(set(divisors.round(3))) >= 3, "neither all as they were nor all divided alike"
    write_gguf(here / "tiny.gguf", tensors={"rope_freqs.weight": divisors})
    assert (logprobs(planned_model("tiny.gguf")) - logprobs(whole)).abs().max() <= 1e-6
    assert (logprobs(tiny_llama()) - logprobs(whole)).abs().max() > 1e-5


def test_tokens_ends_and_the_template_are_those_of_the_file(here: Path):
    """No token is added, which the model would have no embedding for, and no class brings rules of its own."""
    write_gguf(here / "tiny.gguf")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(tiny_model()) / name, here / name)  # of another model, which lies beside it
    directory, whole = planned_model("tiny.gguf"), tiny_llama()
    mine, own = (AutoTokenizer.from_pretrained(path) for path in (directory, whole))
    assert mine.get_vocab() == own.get_vocab()
    assert mine(TEXT)["input_ids"] == own(TEXT)["input_ids"]
    assert mine.decode(mine(TEXT)["input_ids"]) == TEXT
    chat = [{"role": "user", "content": "13 + 29"}]
    render: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    assert mine.apply_chat_template(chat, **render) == own.apply_chat_template(chat, **render)
    made_config, config = (json.loads((path / "config.json").read_text()) for path in (directory, whole))
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters", "architectures"):
        assert made_config.get(name) == config.get(name), name
    assert "quantization_config" not in made_config


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_says_what_its_model_was_made_of_and_goes_on_with_no_other(hub: Hub, here: Path):
    write_gguf(here / "tiny.gguf", kind="Q8_0")
    done = CliRunner().invoke(main, ["train", "grpo.yaml", "train.checkpoint_every=1", "reference.path=tiny.gguf"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "tiny.gguf: LlamaForCausalLM in float32" in done.stdout
    assert "note" in done.stdout
    assert "model.path: tiny.gguf is GGUF of Q8_0, F32 (sha256 " in done.stdout
    run = here / "runs" / "one"
    entry, _ = json.loads((run / "run.json").read_text())["gguf"]
    directory = Path(entry.pop("directory"))
    assert entry.pop("sha256").startswith(directory.name.removeprefix("gguf-"))
    types = {"types": ["Q8_0", "F32"], "dequantized_to": "float32"}
    assert entry == {"key": "model.path", "file": str(here / "tiny.gguf"), **types}
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["path"] == "tiny.gguf"
    assert (run / "model" / "model.safetensors").is_file()

    done = CliRunner().invoke(main, ["train", "grpo.yaml", "--resume", "train.steps=2", "reference.path=tiny.gguf"])
    assert done.exit_code == 0, (done.output, done.exception)
    write_gguf(here / "tiny.gguf", tiny_llama(seed=1), kind="Q8_0")
    line = refused("train", "grpo.yaml", "--resume", "train.steps=3", "reference.path=tiny.gguf")
    assert "--resume: " in line
    assert "model.path" in line


@pytest.mark.slow
def test_an_evaluation_takes_a_file(here: Path):
    write_gguf(here / "tiny-F32.gguf")
    words = ["data.validation=train.jsonl", "evaluation.max_prompts=2", "model.path=gone"]
    done = CliRunner().invoke(main, ["eval", "grpo.yaml", "--model", "tiny-F32.gguf", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    record = json.loads((here / "runs" / "eval-tiny-F32" / "run.json").read_text())
    assert record["evaluated"]["model"] == "tiny-F32.gguf"
    assert record["gguf"][0]["key"] == "--model"
    assert refused("eval", "grpo.yaml", "--model", "tiny-F23.gguf", *words).endswith("Did you mean tiny-F32.gguf?")


def test_it_is_made_once_and_what_fails_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_gguf(here / "tiny.gguf")
    lines: list[str] = []
    first = made.make_model(file, "model.path", lines.append)
    assert any("writing its weights as float32" in line for line in lines)
    lines.clear()
    copy = shutil.copyfile(file, here / "copy.gguf")
    assert made.make_model(copy, "model.path", lines.append).directory == first.directory
    assert not any("writing" in line for line in lines)
    assert "tiny.gguf: GGUF of F32 (sha256 " in (first.directory / "made_from.txt").read_text()

    def fail(header: object, directory: Path, key: str) -> None:
        directory.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made, "_convert", fail)
    write_gguf(file, kind="F16")
    line = refused("plan", "grpo.yaml")
    assert "model.path: tiny.gguf cannot be converted to a model directory (tiny.gguf: No space left on device)" in line
    assert list((here / "cached" / "enginehouse" / "models").iterdir()) == [first.directory]


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.01, 0.2, 0.999])
def test_a_file_that_is_cut_short_is_said(here: Path, part: float):
    content = write_gguf(here / "tiny.gguf").read_bytes()
    (here / "tiny.gguf").write_bytes(content[: int(len(content) * part)])
    line = refused("plan", "grpo.yaml")
    assert line.startswith("Error: model.path: tiny.gguf is ")
    assert line.endswith(": fetch it again")
    assert not list((here / "cached" / "enginehouse" / "models").iterdir())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "rwkv7"}, "does not read tiny.gguf: GGUF model with architecture rwkv7 is not supported"),
        ({"fields": {"split.count": 3}}, "is one of 3 parts, .*join them by llama-gguf-split --merge"),
        (
            {"without": ("blk.1.attn_k.weight",)},
            r"not read all of .* \(it has no model.layers.1.self_attn.k_proj.weight",
        ),
        ({"tensors": {"rope_freqs.weight": np.full(HIDDEN // HEADS // 2, 2, "float32")}}, "tensor rope_freqs.weight"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(HIDDEN, "float32")}}, r"\d+ of \d+ weights"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type: yarn"),
        ({"tokenizer": "rwkv"}, "tokenizer 'rwkv'"),
    ],
)
def test_what_would_be_another_model_is_refused(here: Path, changes: dict[str, Any], said: str):
    write_gguf(here / "tiny.gguf", **changes)
    line = refused("plan", "grpo.yaml")
    assert line.startswith("Error: model.path: ")
    assert re.search(said, line), line
    assert not list((here / "cached" / "enginehouse" / "models").iterdir())


def test_a_missing_reader_is_said_with_its_cure(here: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_gguf(here / "tiny.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("gguf", "accelerate") else name)
    with pytest.raises(ModelError, match=r"model.path: .*tiny.gguf is GGUF.*: pip install accelerate gguf$"):
        made.make_model(file, "model.path", print)


def test_of_several_files_one_is_to_be_named(hub: Hub, here: Path):
    (here / "several").mkdir()
    for name in ("tiny-F16.gguf", "tiny-F32.gguf"):
        write_gguf(here / "several" / name, kind=name[5:8])
    line = refused("plan", "grpo.yaml", "model.path=several")
    assert "several contains several GGUF files; name one of them: tiny-F16.gguf, tiny-F32.gguf" in line
    hub.add_model("acme/tiny-GGUF", here / "several")
    line = refused("plan", "grpo.yaml", "model.path=acme/tiny-GGUF")
    assert "as acme/tiny-GGUF:tiny-F16.gguf: tiny-F16.gguf, tiny-F32.gguf" in line
    line = refused("plan", "grpo.yaml", "model.path=acme/tiny-GGUF:tiny-F23.gguf")
    assert "is no GGUF file of that model. Did you mean 'tiny-F32.gguf'? Available: " in line
    assert not [file for file in hub.fetched() if file.endswith(".gguf")]
    (here / "several" / "model.safetensors").write_bytes(b"")
    assert made.find_gguf("several", "model.path") is None


@pytest.mark.slow
def test_a_file_of_the_hub_is_pinned_and_had_without_it(hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch):
    name = "acme/tiny-GGUF:tiny.gguf"
    hub.models["acme/tiny-GGUF"] = Repository()
    commit = hub.models["acme/tiny-GGUF"].commit({"tiny.gguf": write_gguf(here / "a.gguf").read_bytes()})
    done = CliRunner().invoke(main, ["train", "grpo.yaml", f"model.path={name}"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert f"model.path: acme/tiny-GGUF@{commit[:12]}/tiny.gguf is GGUF of F32" in done.stdout
    entry = json.loads((here / "runs" / "one" / "run.json").read_text())["hub"][0]
    assert (entry["name"], entry["commit"], entry["file"]) == ("acme/tiny-GGUF", commit, "tiny.gguf")
    written = yaml.safe_load((here / "runs" / "one" / "config.yaml").read_text())["model"]["path"]
    assert written == f"acme/tiny-GGUF@{commit}:tiny.gguf"
    hub.close()
    monkeypatch.setattr("enginehouse_rl.hub.snapshots._fetched", {})
    assert planned_model(written) == planned_model(name)
    assert "cannot be fetched" in refused("plan", "grpo.yaml", "model.path=acme/other-GGUF:tiny.gguf")


@pytest.mark.parametrize(
    ("text", "file"),
    [("acme/tiny:a.gguf", "a.gguf"), ("acme/tiny@v1:b/a.gguf", "b/a.gguf"), ("acme/tiny.gguf", None)],
)
def test_which_texts_are_names_of_files(text: str, file: str | None):
    name = HubName.parse(text, "model")
    assert (name and name.file) == file
    assert name is None or str(name) == text
