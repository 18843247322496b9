"""A training engine here and sglang in its own runtime think the same of every token that sglang draws."""

import json
import os
from pathlib import Path

import pytest
from integration.run_process import RunProcess
from projects import Project

from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow

PROMPTS, SAMPLES = 16, 4


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A config with sglang."""
    project = Project(tmp_path)
    project.config |= {
        "model": {"path": tiny_model(hidden=128)},
        "rollout": {
            "samples_per_prompt": SAMPLES,
            "sampling": {"max_tokens": 32, "temperature": 0.8},
            "engine": {
                "backend": "sglang",
                "runtime": os.environ.get("ENGINEHOUSE_TEST_SGLANG_RUNTIME", "auto"),
                "options": {"kv_cache_mib": 64},
            },
        },
    }
    return project


@pytest.mark.exhaustive
@pytest.mark.parametrize("train", ["fsdp", "megatron"])
def test_the_logprobs_sglang_reports_after_an_update_are_those_that_a_trainer_computes(project: Project, train: str):
    project.config["actor"] = {"processes": 2 if train == "fsdp" else 1, "engine": {"backend": train}}
    project.save()
    arguments = ("parity", "grpo.yaml", f"--prompts={PROMPTS}", "--out=found", "--tolerance=1e-4")
    with RunProcess(*arguments, cwd=project.root, directory=project.root, logs=project.root / "logs") as run:
        ended = run.finish(900)
    assert ended.code == 0, ended.out + ended.err
    written = json.loads((project.root / "found" / "parity.json").read_text())
    found = written["found"]
    assert found["sequences"] == PROMPTS * SAMPLES
    assert 0 < found["mean"] <= 1e-4  # exactly 0 would be one engine compared with itself
    assert found["outside"] == 0
    assert written["roles"]["rollout"][0]["backend"] == "sglang"
