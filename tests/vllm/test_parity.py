"""fsdp and vllm, each in its own runtime, think the same of every token that vllm draws."""

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
    """A config for the two, with a model whose heads vLLM's CPU attention takes."""
    project = Project(tmp_path)
    project.config |= {
        "model": {"path": tiny_model(hidden=128)},
        "actor": {"processes": 2, "engine": {"backend": "fsdp"}},
        "rollout": {
            "samples_per_prompt": SAMPLES,
            "sampling": {"max_tokens": 32, "temperature": 0.8},
            "engine": {
                "backend": "vllm",
                "runtime": os.environ.get("ENGINEHOUSE_TEST_VLLM_RUNTIME", "auto"),
                "options": {"kv_cache_mib": 64},
            },
        },
    }
    project.save()
    return project


@pytest.mark.exhaustive
def test_the_logprobs_vllm_reports_after_an_update_are_those_that_fsdp_computes(project: Project):
    arguments = ("parity", "grpo.yaml", f"--prompts={PROMPTS}", "--out=found", "--tolerance=1e-4")
    with RunProcess(*arguments, cwd=project.root, directory=project.root, logs=project.root / "logs") as run:
        ended = run.finish()
    assert ended.code == 0, ended.out + ended.err
    written = json.loads((project.root / "found" / "parity.json").read_text())
    found = written["found"]
    assert found["sequences"] == PROMPTS * SAMPLES
    assert 0 < found["mean"] <= 1e-4  # exactly 0 would be one engine compared with itself
    assert found["outside"] == 0
    actor, rollout = written["roles"]["actor"][0], written["roles"]["rollout"][0]
    assert (actor["backend"], rollout["backend"]) == ("fsdp", "vllm")
    assert actor["pid"] != rollout["pid"]
