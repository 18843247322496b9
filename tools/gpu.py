"""Run all that needs a GPU, on one: `make test-gpu`. What came of it goes to `benchmarks/results/gpu/DEVICE.json`.

    python -m tools.gpu                                    # all steps, in at most 30 minutes
    python -m tools.gpu --model path/to/Qwen3-0.6B         # real weights; unset: random ones of its shapes
    python -m tools.gpu --step tests --step "in turns"

A step is a command that anyone can run, the longest it may take, and what its figures have to be; what is left of the
time bounds it too. `--prepare` makes what they begin from, and runs none. The file is written anew after each step, so
that nothing is lost however it ends. Exit codes: 0 every step that was asked for passed; 1 one
did not, or no time was left for it; 2 there is no GPU here, or no such step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks/results/gpu")
WORK = Path("build/gpu")
"""As every path here, and in what is written, from the checkout's root."""
MODEL = WORK / "Qwen3-0.6B-shapes"
TASK = WORK / "task"
MINUTES = 30.0
TAIL_CHARACTERS = 3000
BIN = Path(sys.executable).parent

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """One thing that is tried.

    Attributes:
        name: for people, and `--step`.
        command: what is run in the checkout, for a shell.
        seconds: the longest it may take.
        figures: reads what it left; called where it exits with 0.
        least: of a figure, what it has to be at least.
        most: at most.
    """

    name: str
    command: str
    seconds: float
    figures: Callable[[], Figures] = dict
    least: Figures = field(default_factory=dict)
    most: Figures = field(default_factory=dict)

    def problems(self, figures: Figures) -> list[str]:
        """What of the figures is not as it has to be, in words."""
        low = [f"{name} is {figures.get(name)}, not at least {least:g}" for name, least in self.least.items()
               if not figures.get(name, float("-inf")) >= least]  # fmt: skip
        high = [f"{name} is {figures.get(name)}, not at most {most:g}" for name, most in self.most.items()
                if not figures.get(name, float("inf")) <= most]  # fmt: skip
        return low + high


TURNS = ("time/step", "time/sync", "time/turns", "turns/actor/freed_mib", "turns/rollout/freed_mib", "mismatch/kl")
ACTOR_FREED = {"turns/actor/freed_mib": 4000.0}
"""MiB of 0.6 billion parameters: float32 weights and two moments are 6,800."""
BOTH_FREED = ACTOR_FREED | {"turns/rollout/freed_mib": 1000.0}
"""The weights in bfloat16 are 1,140."""


def steps(model: Path) -> list[Step]:
    """All of them, in order; `model` has the shapes of Qwen3-0.6B."""
    quickstart, train_engine = Path("runs/quickstart"), Path("benchmarks/out/train_engine.json")
    large = (
        f"examples/quickstart/grpo.yaml cluster.device=cuda model.path={shlex.quote(str(model))} "
        f"data.train={TASK}/train.jsonl data.validation=null data.max_prompt_tokens=64 train.steps=3 "
        "actor.engine.backend=fsdp actor.engine.options.lr=1e-6"
    )

    def trained(
        name: str, overrides: str, columns: Sequence[str], seconds: float, least: Figures | None = None
    ) -> Step:
        directory = WORK / "runs" / _slug(name)
        command = f"enginehouse train {large} {overrides} run.directory={directory} run.overwrite=true"
        return Step(name, command, seconds, lambda: last_metrics(directory, columns), least or {})

    def certified(name: str, seconds: float) -> Step:
        out = WORK / "certificates" / name
        command = f"enginehouse certify {name} --device cuda --layout single --quick --out {out}"
        return Step(f"certify {name}", command, seconds)

    long = "rollout.sampling.max_tokens=512"
    return [
        Step("tests", "python -m pytest -q -p no:cacheprovider -n 0 -m gpu tests --timeout 600", 360),
        certified("torch", 120),
        certified("fsdp", 180),
        certified("vllm", 300),
        Step(
            "quickstart",
            "examples/quickstart/run.sh cluster.device=cuda",
            240,
            lambda: last_metrics(newest(quickstart), ["reward/mean"]),
            least={"reward/mean": 0.8},
        ),
        trained("in one process", long, ("time/step", "time/sync", "mismatch/kl"), 180),
        trained(
            "long passes",
            "rollout.sampling.max_tokens=1024 actor.engine.options.tokens_per_microbatch=81920",
            ("time/step", "time/update"),
            180,
        ),
        trained("in turns", f"{long} rollout.placement=shared", TURNS, 180, BOTH_FREED),
        trained("in turns with vllm", f"{long} rollout.engine.backend=vllm", TURNS, 300, ACTOR_FREED),
        trained("in turns with sglang", f"{long} rollout.engine.backend=sglang", TURNS, 300, ACTOR_FREED),
        Step(
            "parity of fsdp and vllm",
            f"enginehouse parity {large} rollout.engine.backend=vllm --out {WORK}/parity",
            240,
            lambda: numbers(WORK / "parity" / "parity.json"),
        ),
        Step(
            "benchmark of the training engine",
            "python -m benchmarks train_engine hidden=1024 layers=16 device=cuda",
            240,
            lambda: numbers(train_engine, "metrics"),
            least={"fsdp_vs_bare": 0.95},
            most={"fsdp_memory_vs_bare": 1.05},
        ),
    ]


def last_metrics(run: Path, columns: Iterable[str]) -> Figures:
    """What of a run's last step these columns say."""
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: row[name] for name in columns if name in row}


def numbers(path: Path, key: str | None = None) -> Figures:
    """The numbers at the top of a JSON file, or below a key of it."""
    content = json.loads(path.read_text())
    found = content if key is None else content[key]
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def newest(run: Path) -> Path:
    """Of a run's directory and those numbered after it, the one that was made last."""
    return max(run.parent.glob(f"{run.name}*"), key=lambda path: path.stat().st_mtime)


def make_model(path: Path) -> None:
    """Random weights of the shapes of Qwen3-0.6B, with the quickstart's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from enginehouse.recipes.sorting import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)


def prepare(model: Path | None) -> None:
    """Make what the steps begin from: data, and, unless a model is given, `MODEL`."""
    WORK.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "examples/quickstart/make_task.py", "--out", str(TASK)], check=True)
    if model is None and not MODEL.exists():
        make_model(MODEL)


FACTS = """
import json, torch
one = torch.cuda.get_device_properties(0)
nccl = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps({"device": one.name, "gib": round(one.total_memory / 2**30, 1), "torch": torch.__version__,
                  "cuda": torch.version.cuda, "nccl": nccl}))
"""


def interpreters() -> dict[str, dict[str, Any]]:
    """What each Python environment here sees of the GPU: this one's, and those of the runtimes; none where it sees
    none. Environments whose NCCL differs cannot be in one NCCL group."""
    from enginehouse.runtimes.store import folder

    found = {}
    for python in [Path(sys.executable), *sorted(folder().glob("*/bin/python"))]:
        asked = subprocess.run([python, "-c", FACTS], capture_output=True, text=True, timeout=120)
        if asked.returncode == 0:
            name = "driver" if python == Path(sys.executable) else python.parents[1].name
            found[name] = json.loads(asked.stdout.splitlines()[-1])
    return found


def run(step: Step, seconds: float) -> dict[str, Any]:
    """Run a step, for at most so many seconds; returns what is written of it."""
    began = time.monotonic()
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    log = WORK / f"{_slug(step.name)}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            step.command, shell=True, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
    row: dict[str, Any] = {"command": step.command, "seconds": round(time.monotonic() - began, 1), "exit_code": code}
    problems = [f"it was ended after {seconds:.0f} s"] if code is None else [f"exit code {code}"] if code else []
    if not problems:
        try:
            row["figures"] = dict(step.figures())
            problems = step.problems(row["figures"])
        except (OSError, ValueError, LookupError) as error:
            problems = [f"its figures cannot be read: {type(error).__name__}: {error}"]
    row["passed"] = not problems
    if problems:
        row |= {"problems": problems, "end_of_output": log.read_text(errors="replace")[-TAIL_CHARACTERS:]}
    return row


def run_all(chosen: Sequence[Step], facts: Mapping[str, Any], path: Path, minutes: float) -> bool:
    """Run steps one after another, and write what came of them to `path`, anew after each.

    Returns:
        Whether all passed.
    """
    began, rows = time.monotonic(), dict[str, Any]()
    for step in chosen:
        left = minutes * 60 - (time.monotonic() - began)
        print(f"{step.name} ...", flush=True)
        if left < 10:
            rows[step.name] = {"command": step.command, "passed": False, "problems": ["not run: no time was left"]}
        else:
            rows[step.name] = run(step, min(step.seconds, left))
        row = rows[step.name]
        said = "; ".join(row.get("problems", [])) or ", ".join(f"{k} {v:.4g}" for k, v in row["figures"].items())
        print(f"  {'passed' if row['passed'] else 'FAILED'} in {row.get('seconds', 0):.0f} s. {said}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({**facts, "minutes": round((time.monotonic() - began) / 60, 1), "steps": rows}, indent=2) + "\n"
        )
    return all(row["passed"] for row in rows.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="directory of Qwen3-0.6B; unset: random weights of its shapes")
    parser.add_argument("--step", action="append", metavar="NAME", help="only this step; may be repeated")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"the longest all may take (default {MINUTES:g})"
    )
    parser.add_argument("--prepare", action="store_true", help="make the model and data of the steps, and run none")
    parser.add_argument("--list", action="store_true", help="list the steps and their commands, and run none")
    given = parser.parse_args(arguments)
    os.chdir(ROOT)
    known = {step.name: step for step in steps(given.model or MODEL)}
    if unknown := [name for name in given.step or () if name not in known]:
        parser.error(f"there is no step {unknown[0]!r}; there are: {', '.join(known)}")
    chosen = [known[name] for name in given.step or known]
    if given.list:
        for step in chosen:
            print(f"{step.name} (at most {step.seconds:g} s)\n  {step.command}")
        return 0
    if given.prepare:
        prepare(given.model)
        return 0
    found = interpreters()
    if "driver" not in found:
        print(
            f"no GPU that torch can use is visible here ({sys.executable}): this runs what needs one. Where there is "
            "one, `nvidia-smi` lists it, and torch has to be a CUDA build",
            file=sys.stderr,
        )
        return 2
    prepare(given.model)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = found["driver"]["device"]
    facts = {"device": device, "weights": "given" if given.model else "random", "commit": commit,
             "machine": machine(), "interpreters": found}  # fmt: skip
    path = RESULTS / f"{_slug(device)}.json"
    passed = run_all(chosen, facts, path, given.minutes)
    print(f"written to {path}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
