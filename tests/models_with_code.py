"""Model directories that bring Python code, which says so when it is run."""

import json
import shutil
from pathlib import Path

import pytest

from enginehouse_testing.models import tiny_model

CODE = """
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

open({mark!r}, "a").write("run")

class BroughtConfig(Qwen3Config):
    model_type = "brought"

class BroughtForCausalLM(Qwen3ForCausalLM):
    config_class = BroughtConfig

class BroughtTokenizer(PreTrainedTokenizerFast):
    pass
"""


class ModelWithCode:
    """A tiny model whose config, model and tokenizer are classes of a file beside its weights; `path` is its directory.

    Each has a name of its own: transformers runs what it has run before no second time.
    """

    def __init__(self, root: Path):
        self.path, self._mark = root / f"with_code_{root.name}", root / "code-ran"
        shutil.copytree(tiny_model(), self.path)
        (self.path / "brought.py").write_text(CODE.format(mark=str(self._mark)))
        self._change("config.json", architectures=["BroughtForCausalLM"], model_type="brought", auto_map={
            "AutoConfig": "brought.BroughtConfig", "AutoModelForCausalLM": "brought.BroughtForCausalLM"
        })  # fmt: skip
        self._change(
            "tokenizer_config.json",
            tokenizer_class="BroughtTokenizer",
            auto_map={"AutoTokenizer": [None, "brought.BroughtTokenizer"]},
        )

    @property
    def code_ran(self) -> bool:
        """Whether its code was run."""
        return self._mark.exists()

    def _change(self, name: str, **content: object) -> None:
        file = self.path / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **content}))


@pytest.fixture
def model_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelWithCode:
    """One; transformers' copy of its code goes below `tmp_path`."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return ModelWithCode(tmp_path)
