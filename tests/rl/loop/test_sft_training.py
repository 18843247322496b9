"""A supervised run, whole but small: its held-out loss is that of the model it exports, and adapters are exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from enginehouse.cli.main import main
from enginehouse_testing.models import tiny_model


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, numbers in (("train", range(30)), ("held_out", range(30, 37))):
        rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": tiny_model()},
        "data": {"train": "train.jsonl", "validation": "held_out.jsonl", "max_tokens": 16},
        "actor": {"engine": {"options": {"lr": 1e-2}}},
        "train": {"steps": 4, "rows_per_step": 4, "validate_every": 2, "save_every": 2},
        "cluster": {"launcher": "inline", "device": "cpu"},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def run(*overrides: str) -> tuple[list[dict[str, Any]], str]:
    """Run to the end; returns the metrics of its steps, and what was said."""
    done = CliRunner().invoke(main, ["sft", "sft.yaml", "run.directory=run", *overrides])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()], done.output


def loss_of(model: Any, tokenizer: Any, path: Path) -> float:
    """By transformers, of the responses in a file: the mean over their tokens, the end among them."""
    losses = []
    for row in map(json.loads, path.read_text().splitlines()):
        prompt, whole = (tokenizer(text)["input_ids"] for text in (row["prompt"], f"{row['prompt']}{row['response']}"))
        ids = torch.tensor([[*whole, tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        losses += (-logprobs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0]).tolist()
    return sum(losses) / len(losses)


@pytest.mark.slow
def test_the_held_out_loss_is_that_of_the_exported_model(house: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    metrics, said = run()
    assert "was not compared with the trained model" not in said
    validated = {row["step"]: row["validation/loss"] for row in metrics if "validation/loss" in row}
    assert list(validated) == [2, 4]
    for step, loss in validated.items():
        directory = f"run/models/step-{step:06}"
        model = AutoModelForCausalLM.from_pretrained(directory)
        assert loss == pytest.approx(loss_of(model, AutoTokenizer.from_pretrained(directory), house / "held_out.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("export", ["adapter", "both"])
def test_an_adapter_is_exported_as_peft_reads_it(house: Path, export: str):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    fsdp = ("actor.engine.backend=fsdp", "actor.engine.options.lora.rank=2")
    metrics, said = run(*fsdp, f"train.export={export}", "train.models_kept=1")
    assert "was not compared with the trained model" not in said
    (kept,) = Path("run/models").iterdir()
    place = kept / "adapter" if export == "both" else kept
    assert (kept / "model.safetensors").exists() == (export == "both")
    assert ("AutoPeftModelForCausalLM.from_pretrained('run/model')" in said) == (export == "adapter")
    model = AutoPeftModelForCausalLM.from_pretrained(place)
    loss = loss_of(model, AutoTokenizer.from_pretrained(tiny_model()), house / "held_out.jsonl")
    assert metrics[-1]["validation/loss"] == pytest.approx(loss, abs=1e-5)
