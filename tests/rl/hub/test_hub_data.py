"""Data sets by their names on the hub: which files a split is, and that rows are read as of any file."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from click.testing import CliRunner
from hub_server import Hub, Repository
from pyarrow import parquet

from enginehouse.cli.main import main
from enginehouse_rl.hub import snapshots
from enginehouse_testing.models import tiny_model

NAME = "acme/sums"
CARD = """---
configs:
- {config_name: main, data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]}
- {config_name: socratic, data_files: [{split: train, path: socratic/train-*}]}
---
# Sums
"""


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [{"question": f"{n}+1=", "answer": f"#### {n + 1}"} for n in range(first, first + count)]


def as_parquet(content: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(content), file)
    return file.getvalue()


def as_jsonl(content: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in content).encode()


GSM = {
    "README.md": CARD.encode(),
    "main/train-00000-of-00002.parquet": as_parquet(rows(0, 8)),
    "main/train-00001-of-00002.parquet": as_parquet(rows(8, 8)),
    "main/test-00000-of-00001.parquet": as_parquet(rows(16, 4)),
    "socratic/train-00000-of-00001.parquet": as_parquet(rows(20, 4)),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = {
        "model": {"path": tiny_model()},
        "data": {"train": f"{NAME}:main/train", "prompt": "question", "max_prompt_tokens": 16},
        "reward": {"function": "numeric"},
        "rollout": {"samples_per_prompt": 2, "sampling": {"max_tokens": 4}},
        "train": {"steps": 1, "prompts_per_step": 2},
        "cluster": {"device": "cpu", "launcher": "inline"},
        "run": {"directory": "runs/one"},
    }
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def planned(*words: str) -> str:
    done = CliRunner().invoke(main, ["plan", "grpo.yaml", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def refused(*words: str) -> str:
    """Return the one line by which a plan refuses, with exit code 2."""
    done = CliRunner().invoke(main, ["plan", "grpo.yaml", *words])
    assert done.exit_code == 2, (done.output, done.exception)
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    return line


def test_a_split_is_trained_and_validated_on(hub: Hub, here: Path):
    """All files of the split are one source, those of others are not fetched, and the commit is written down."""
    commit = hub.add_dataset(NAME, GSM)
    done = CliRunner().invoke(main, ["train", "grpo.yaml", f"data.validation={NAME}:main/test"])
    assert done.exit_code == 0, (done.output, done.exception)
    short = f"{NAME}@{commit[:12]}/main"
    assert f"16 prompts in {short}/train-00000-of-00002.parquet, {short}/train-00001-of-00002.parquet" in done.stdout
    assert f"4 of {short}/test-00000-of-00001.parquet" in done.stdout
    assert "socratic/train-00000-of-00001.parquet" not in hub.fetched()
    written = yaml.safe_load((here / "runs" / "one" / "config.yaml").read_text())["data"]
    assert (written["train"], written["validation"]) == (f"{NAME}@{commit}:main/train", f"{NAME}@{commit}:main/test")
    entries = json.loads((here / "runs" / "one" / "run.json").read_text())["hub"]
    assert [(entry["key"], entry["commit"], entry["config"], entry["split"]) for entry in entries] == [
        ("data.train", commit, "main", "train"),
        ("data.validation", commit, "main", "test"),
    ]
    asked = len(hub.requests)
    hub.close()
    snapshots._fetched.clear()
    assert short in CliRunner().invoke(main, ["plan", "runs/one/config.yaml", "run.directory=runs/two"]).output
    assert hub.requests[asked:] == []


def test_a_run_goes_on_with_the_rows_that_it_began_with(hub: Hub, here: Path):
    first = hub.add_dataset(NAME, GSM)
    done = CliRunner().invoke(main, ["train", "grpo.yaml", "train.checkpoint_every=1"])
    assert done.exit_code == 0, (done.output, done.exception)
    second = hub.add_dataset(NAME, {**GSM, "main/train-00000-of-00002.parquet": as_parquet(rows(40, 8))})
    snapshots._fetched.clear()
    assert f"{NAME} at {first}" in planned("--resume", "train.steps=2")
    hub.datasets[NAME].branches["v2"] = second
    said = refused("--resume", "train.steps=2", f"data.train={NAME}@{second}:main/train")
    assert f"which is the commit {second[:12]}, but the run began with {first[:12]}" in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("acme/none:main/train", "has no public data set acme/none"),
        (NAME, f"it has several configurations, main, socratic; name one of them, such as {NAME}:main/train"),
        (f"{NAME}:main", f"name one of them, such as {NAME}:main/train"),
        (f"{NAME}:mian/train", "it has no configuration 'mian'. Did you mean 'main'? Available: main, socratic"),
        (f"{NAME}:main/trian", "has no split 'trian'. Did you mean 'train'? Available: test, train"),
        (f"{NAME}:main/train[:10]", "has no split 'train[:10]'. Did you mean 'train'?"),
        (f"{NAME}@v1:main/train", f"the data set {NAME} has no revision 'v1' on the hub. Available: main"),
        ("acme/tables:train", "is stored as train.csv, but rows can only be read from"),
        ("acme/empty:train", "`datasets` finds no data files in acme/empty:train"),
    ],
)
def test_a_name_that_is_no_split_is_told_which_there_are(hub: Hub, here: Path, name: str, said: str):
    hub.add_dataset(NAME, GSM)
    hub.add_dataset("acme/tables", {"train.csv": b"prompt,answer\n1+1=,2\n"})
    hub.add_dataset("acme/empty", {"README.md": b"# Nothing"})
    line = refused(f"data.train={name}")
    assert line.startswith("Error: data.train: ")
    assert said in line


def test_data_sets_without_a_card(hub: Hub, here: Path):
    """Where only file names say what is what: a split alone, or none, where one is usual."""
    commit = hub.add_dataset(NAME, {"train.jsonl": as_jsonl(rows(0, 8)), "test.jsonl": as_jsonl(rows(8, 4))})
    train = f"{NAME}@{commit[:12]}/train.jsonl"
    for name in (NAME, f"{NAME}:train", f"{NAME}:default/train"):
        assert f"8 prompts in {train}" in planned(f"data.train={name}", f"data.validation={NAME}:test")
    said = refused(f"data.train={NAME}", f"data.validation={NAME}")
    assert f"data.validation: {NAME} has several splits; name one of them: {NAME}:default/train" in said
    assert f"0.75 of {train} (8 prompts" in planned(f"data.train={{{NAME}:train: 3, {NAME}:test: 1}}")


def test_a_weight_is_of_one_file(hub: Hub, here: Path):
    hub.add_dataset(NAME, GSM)
    said = refused(f"data.train={{{NAME}:main/train: 3, {NAME}:main/test: 1}}")
    assert f"data.train: {NAME}:main/train is stored as 2 files" in said
    assert "16 prompts" in planned(f"data.train=[{NAME}:main/train]")


def test_data_that_is_not_here_stays_a_file(hub: Hub, here: Path):
    (here / "data").mkdir()
    for path in ("data/train", "acme/train.jsonl", "./acme/sums", "train.jsonl"):
        assert "there is no data file" in refused(f"data.train={path}")
    assert not hub.requests


def test_supervised_and_preference_runs_take_names(hub: Hub, here: Path):
    hub.datasets["acme/pairs"] = Repository()
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(8)]
    hub.add_dataset("acme/pairs", {"train.jsonl": as_jsonl(pairs), "test.jsonl": as_jsonl(pairs)})
    hub.add_model("acme/tiny", tiny_model())
    config: dict[str, Any] = {
        "model": {"path": "acme/tiny"},
        "data": {"train": "acme/pairs", "validation": ["acme/pairs:test"], "max_tokens": 16},
        "train": {"steps": 1, "rows_per_step": 4},
        "cluster": {"device": "cpu", "launcher": "inline"},
    }
    (here / "pairs.yaml").write_text(yaml.safe_dump(config))
    config["data"] |= {"response": "chosen"}
    (here / "sft.yaml").write_text(yaml.safe_dump(config))
    for command, file, extra in (
        ("sft", "sft.yaml", ()),
        ("dpo", "pairs.yaml", ("reference.path=acme/tiny",)),
        ("rm", "pairs.yaml", ()),
    ):
        done = CliRunner().invoke(main, ["plan", f"--{command}", file, *extra])
        assert done.exit_code == 0, (done.output, done.exception)
        assert "acme/pairs@" in done.output
        assert "acme/tiny@" in done.output
