"""An exported model, scored by transformers, is compared with the engine that it came from."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from row_tokenizers import make_tokenizer
from torch_train_cases import POLICY, SQUARED_ERROR, make_batch, make_engine

from enginehouse.data import Batch
from enginehouse.engines.model import ModelSpec
from enginehouse.roles.file_scores import score_files
from enginehouse.roles.sequence_scores import VALUES, append_end
from enginehouse_rl.loop.export_comparison import ExportDiffers, compare_export
from enginehouse_rl.loop.exports import name_ends
from enginehouse_testing.models import tiny_model


def trained(head: Any, directory: Path) -> tuple[Any, Any, ModelSpec]:
    """An engine that has trained and exported, its workers as a group calls them, and what it was loaded from."""
    engine = make_engine(tiny_model(), head=head, lr=1e-2)
    for _ in range(3):
        train(engine, head)
    engine.export_hf(str(directory))

    def score_rows(rows: Any) -> Batch:
        values = engine.forward(append_end(rows.batch), VALUES).ragged("values")
        return Batch({"score": values.values[values.offsets[1:] - 1]})

    workers: Any = SimpleNamespace(
        forward=lambda rows, outputs: engine.forward(rows.batch, outputs),
        score_rows=score_rows,
        score_files=score_files,
    )
    return engine, workers, ModelSpec(tiny_model(), head=head)


def train(engine: Any, head: str) -> None:
    engine.forward_backward(make_batch(3, 2), POLICY if head == "causal_lm" else SQUARED_ERROR)
    engine.optim_step()


@pytest.mark.parametrize(("head", "named"), [("causal_lm", "the logprobs of the tokens"), ("value", "the score")])
def test_an_export_is_what_was_trained_until_that_is_trained_on(tmp_path: Path, head: str, named: str):
    engine, workers, spec = trained(head, tmp_path)
    assert compare_export(tmp_path, workers, spec) == ""
    for _ in range(5):
        train(engine, head)
    with pytest.raises(ExportDiffers, match=rf"differs from the trained model: {named} of '1 \+ 1 = 2', computed by"):
        compare_export(tmp_path, workers, spec)


def test_a_score_at_another_token_is_refused(tmp_path: Path):
    _, workers, spec = trained("value", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": 1}))  # the end of sequence
    with pytest.raises(ExportDiffers):
        compare_export(tmp_path, workers, spec)


def test_what_is_too_large_or_cannot_be_loaded_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, workers, spec = trained("causal_lm", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert compare_export(tmp_path, workers, spec).startswith("transformers cannot load it here (OSError: ")
    monkeypatch.setattr("enginehouse.roles.file_scores.MOST_BYTES", -1)
    assert compare_export(tmp_path, workers, spec) == "loading it in transformers would take 0.0 GiB"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": 9, "top_p": 0.5}}, {"eos_token_id": [9, 6, 3], "top_p": 0.5}),
        ({"config.json": {"eos_token_id": [6, 9]}}, {"eos_token_id": [6, 9, 3]}),
        ({"generation_config.json": {"eos_token_id": [3, 6]}}, {"eos_token_id": [3, 6]}),
    ],
)
def test_an_export_names_what_ends_a_turn(tmp_path: Path, files: dict[str, Any], expected: dict[str, Any]):
    make_tokenizer("bytes").save_pretrained(tmp_path / "model")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    name_ends(tmp_path, ModelSpec(str(tmp_path / "model")))
    assert json.loads((tmp_path / "generation_config.json").read_text()) == expected
