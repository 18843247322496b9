"""docs/gpu.md: its configs can start on the GPUs it names, and need the memory it says."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from projects import Project, project  # noqa: F401 - a fixture
from tools.update_seconds import table

from enginehouse.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
SETTINGS = re.findall(r"^```yaml\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}
SHAPES = {
    "Qwen3-0.6B": QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064,
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "Qwen3-32B": QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.fixture
def planned(project: Project, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:  # noqa: F811
    """What `enginehouse plan` says of a config; where no engine has a runtime."""
    monkeypatch.setenv("ENGINEHOUSE_RUNTIMES", str(project.root / "runtimes"))
    (project.root / "models").mkdir()
    for name, shape in SHAPES.items():
        project.make_model(f"models/{name}", **shape)
        project.write_tokenizer(f"models/{name}")
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(600)]
    rows[0]["prompt"] = "1" * (1024 - 8)  # a plan goes by the longest, of which no tokenizer makes more than 1,024
    (project.root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def planned(config: str, *options: str) -> tuple[int, str]:
        (project.root / "run.yaml").write_text(config)
        result = CliRunner().invoke(main, ["plan", "run.yaml", *options])
        return result.exit_code, result.output

    return planned


@pytest.mark.parametrize(
    ("config", "memory", "gpus"), [(*setting, gpus) for setting, gpus in zip(SETTINGS, (1, 8, 16), strict=True)]
)
def test_each_config_can_start_and_needs_the_memory_that_is_said(planned, config: str, memory: str, gpus: int):
    code, said = planned(config, "--gpus", str(gpus), "--gpu", "H100")
    assert code == 0, said
    assert "taking turns with the actor on its devices" in said
    column = said.index("GiB per rank") - said.rindex("\n", 0, said.index("GiB per rank")) - 1
    lines = [line[column:].rstrip() for line in said.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("GiB per rank"))
    assert lines[at : at + len(memory.splitlines())] == memory.splitlines()


def test_the_page_is_asked_for_as_it_says(planned):
    small, seven, _ = (config for config, _ in SETTINGS)
    assert planned(seven, "--gpus", "8", "--gpu", "H100")[0] == 0
    code, said = planned(seven, "--gpus", "8", "--gpu", "L4")
    assert code == 2
    assert "31.9 of 22.0 GiB on each of 8 GPUs, while the actor computes" in said
    code, said = planned(seven, "--gpus", "8", "--gpu", "L4", "--suggest")
    assert code == 2
    overrides = re.findall(r"\S+=\S+", said.partition("The run can start with these overrides:")[2].split("\n\n")[1])
    assert planned(seven, *overrides, "--gpus", "8", "--gpu", "L4")[0] == 0
    assert planned(small, "--gpus", "1", "--gpu", "L4", "--suggest")[0] == 0


def test_the_seconds_of_weight_updates_are_those_that_the_tool_calculates():
    assert table() in PAGE, "python -m tools.update_seconds"
