"""A user's project on disk: data, a reward, a model directory and a config that `plan` accepts.

The model directory has the right files and no weights: planning reads names and JSON, never tensors.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from character_tokenizer import make_tokenizer

from enginehouse.errors import UserError
from enginehouse.plugin import PluginManager, load_plugins
from enginehouse_rl.config.load import load_config
from enginehouse_rl.plan.plan import Plan, plan

NO_WEIGHTS = b"\x02\0\0\0\0\0\0\0{}"
"""A safetensors file without a tensor."""

REWARD = """
def right(prompt, response, finish_reason, answer, **columns):
    return float(response == answer)

def bare(prompt, response):
    return 0.0

not_a_function = 3
"""


QUICK_TRAINER = """
import sys, types

class Quick:
    def __init__(self, plan, run, progress):
        self.directory = run
    def run(self):
        self.directory.log(1, {"loss": 1.0})

sys.modules["enginehouse_rl.loop.sft"] = types.SimpleNamespace(SFTTrainer=Quick)
"""
"""Source that gives `enginehouse sft` a trainer that takes one step, at once."""


class Project:
    """A directory with everything a run needs; tests break one thing at a time."""

    def __init__(self, root: Path):
        self.root = root
        self.make_model("model")
        self.write_rows("train.jsonl", [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)])
        self.write_rows("demonstrations.jsonl", [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(40)])
        pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(40)]
        self.write_rows("pairs.jsonl", pairs)
        rated = [{"prompt": f"{n}+1=", "completion": str(n + 1 - n % 2), "label": n % 2 == 0} for n in range(40)]
        self.write_rows("rated.jsonl", rated)
        (root / "scoring.py").write_text(REWARD)
        self.config: dict[str, Any] = {
            "model": {"path": "model"},
            "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
            "reward": {"function": "scoring:right"},
            "rollout": {"samples_per_prompt": 4, "sampling": {"max_tokens": 8}},
            "train": {"steps": 10, "prompts_per_step": 8},
            "cluster": {"device": "cpu"},
            "run": {"directory": "runs/one"},
        }
        self.sft_config: dict[str, Any] = {
            "model": {"path": "model"},
            "data": {"train": "demonstrations.jsonl", "max_tokens": 32},
            "train": {"steps": 5, "rows_per_step": 8},
            "cluster": {"device": "cpu"},
            "run": {"directory": "runs/warm"},
        }

        self.preference_config: dict[str, Any] = {
            "model": {"path": "model"},
            "data": {"train": "pairs.jsonl", "max_tokens": 32},
            "train": {"steps": 5, "rows_per_step": 8},
            "cluster": {"device": "cpu", "launcher": "inline"},
            "run": {"directory": "runs/preferred"},
        }

    def make_model(self, name: str, tokenizer: Any = None, **config: Any) -> Path:
        directory = self.root / name
        directory.mkdir()
        tokens = 31 if tokenizer is None else len(tokenizer)
        content = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": tokens, "max_position_embeddings": 128} | config
        (directory / "config.json").write_text(json.dumps(content))
        (directory / "model.safetensors").write_bytes(NO_WEIGHTS)
        if tokenizer is None:
            (directory / "tokenizer.json").write_text("{}")
        else:
            tokenizer.save_pretrained(directory)
        return directory

    def write_tokenizer(self, model: str = "model", chat_template: str | None = None) -> None:
        """Give a model a tokenizer that can be loaded, over characters, and rows for its tokens."""
        directory = self.root / model
        make_tokenizer(chat_template).save_pretrained(directory)
        config = directory / "config.json"
        config.write_text(config.read_text().replace('"vocab_size": 31', '"vocab_size": 64'))

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> Path:
        path = self.root / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def save(self, name: str = "grpo.yaml") -> Path:
        path = self.root / name
        path.write_text(yaml.safe_dump(self.config))
        return path

    def save_sft(self, name: str = "sft.yaml") -> Path:
        path = self.root / name
        path.write_text(yaml.safe_dump(self.sft_config))
        return path

    def save_preferences(self, name: str = "preferences.yaml") -> Path:
        path = self.root / name
        path.write_text(yaml.safe_dump(self.preference_config))
        return path

    def planned(
        self, *overrides: str, enabled: Sequence[str] = ("torch",), plugins: PluginManager | None = None, **how: Any
    ) -> Plan:
        """Plan a GRPO run of the config as it stands, with overrides; of plugins with core's own and those enabled."""
        path = self.save()
        return plan(load_config(path, overrides), plugins or load_plugins(enabled=enabled), path, **how)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project that is the current directory; what it makes importable is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield Project(tmp_path)
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def refusal(make: Callable[..., Any], *given: Any, kind: type[UserError] | None = None) -> str:
    """Return what the error says by which `make` refuses what is given: of this very kind, where one is named."""
    with pytest.raises(UserError) as caught:
        make(*given)
    assert kind in (None, type(caught.value)), repr(caught.value)
    return str(caught.value)
