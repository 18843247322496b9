"""The steps of `make test-gpu`: each has a command, modules it needs, a time limit, and accepted ranges of its figures.

Training runs must do three things that no wrong gradient, optimizer or update can do at once: the loss of two passes
over the same samples falls, every matrix of the model changes, and the rollout computes with the trained weights.
`SMALL` are the same steps on a CPU, for `--rehearse`.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

WORK = Path("build/gpu")
"""Relative to the checkout's root, like every path here and in the results."""
TASK = WORK / "task"

Figures = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the steps.

    Attributes:
        device: torch device type.
        model: model of the training runs; `make_model` makes it unless it is given.
        overrides: config overrides of these runs.
        tokens: tokens of a response.
        long_tokens: tokens of a response in the step "long passes".
        kernels: arguments of `tools.gpu.kernels`.
        memory: arguments of `tools.gpu.memory`.
        most_kl: largest divergence between rollout and trainer, in nats per token.
    """

    device: str
    model: Path
    overrides: str
    tokens: int
    long_tokens: int
    kernels: str
    memory: str
    most_kl: float


LARGE = Size(
    device="cuda", model=WORK / "Qwen3-0.6B-random", overrides="actor.engine.options.lr=1e-5", tokens=512,
    long_tokens=1024, kernels="--tokens 253 1410 9000 --heads 64 128", memory="--models Qwen3-0.6B Qwen3-1.7B",
    most_kl=0.01,
)  # fmt: skip
SMALL = Size(
    device="cpu", model=WORK / "small", overrides="actor.engine.options.lr=3e-3 train.prompts_per_step=8", tokens=16,
    long_tokens=32, kernels="--tokens 70 --heads 32", memory="--models tiny", most_kl=1e-5,
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One step of the test run.

    Attributes:
        name: name for people and for `--step`.
        command: shell command that runs in the checkout.
        seconds: time limit.
        needs: modules without which the step is not run; an engine's runtime counts as its module.
        figures: reads the figures that the command left; called if it exits with 0.
        least: smallest accepted value of each figure.
        most: largest accepted value of each figure.
        skipped: reason why the step is not rehearsed; empty if it is.
    """

    name: str
    command: str
    seconds: float
    needs: tuple[str, ...] = ()
    figures: Callable[[], Figures] = dict
    least: Figures = field(default_factory=dict)
    most: Figures = field(default_factory=dict)
    skipped: str = ""

    def problems(self, figures: Figures) -> list[str]:
        """Describe the figures that are outside of their accepted range."""
        low = [f"{name} is {figures.get(name)}, not at least {least:g}" for name, least in self.least.items()
               if not figures.get(name, float("-inf")) >= least]  # fmt: skip
        high = [f"{name} is {figures.get(name)}, not at most {most:g}" for name, most in self.most.items()
                if not figures.get(name, float("inf")) <= most]  # fmt: skip
        return low + high


GPU_TESTS = "tests/core/data/test_batch.py tests/fsdp/test_gpu.py tests/fsdp/test_offload.py"
MEGATRON_TESTS = "tests/megatron/test_gpu.py tests/megatron/test_offload.py"
TRAINING = ("torch", "transformers", "pydantic")
PYTEST = ("pytest", "xdist", "pytest_timeout", "hypothesis")
TURNS = ("time/turns", "turns/actor/freed_mib", "turns/rollout/freed_mib")
ACTOR_FREED = {"turns/actor/freed_mib": 4000.0}
"""MiB of 0.6 billion parameters: float32 weights and two moments are 6,800."""
BOTH_FREED = ACTOR_FREED | {"turns/rollout/freed_mib": 1000.0}
"""The weights in bfloat16 are 1,140."""


def steps(size: Size = LARGE) -> list[Step]:
    """Return all steps, those that tell most per second first."""
    small = size.device == "cpu"
    common = (
        f"examples/quickstart/grpo.yaml cluster.device={size.device} model.path={shlex.quote(str(size.model))} "
        f"data.train={TASK}/train.jsonl data.validation=null data.max_prompt_tokens=64 actor.engine.backend=fsdp"
    )
    learning = (
        f"{common} reward.function=tools.gpu.reward:even_share train.steps=3 algorithm.epochs=2 "
        f"algorithm.loss.arguments.aggregation=sequence_mean_token_mean actor.engine.options.warmup_steps=0 "
        f"{size.overrides}"
    )
    inline, tokens = "cluster.launcher=inline", f"rollout.sampling.max_tokens={size.tokens}"

    def trained(
        name: str, overrides: str, seconds: float, needs: tuple[str, ...] = (), least: Figures | None = None
    ) -> Step:
        directory = WORK / "runs" / slug(name)
        arguments = f"{learning} {overrides} run.directory={directory}"
        if small and needs[1:]:  # an engine that takes a minute to start is only planned
            plan = f"enginehouse plan {arguments} cluster.device=cuda --gpus 1 --gpu H100"
            return Step(name, plan, seconds)
        return Step(
            name, f"enginehouse train {arguments} run.overwrite=true", seconds, (*TRAINING, *needs),
            lambda: learned(directory, size.model),
            {"grad_norm/least": 1e-9, "weights/changed": 1.0} | dict({} if small else least or {}),
            {"loss/mean": -1e-9, "mismatch/kl": size.most_kl},
        )  # fmt: skip

    def certified(name: str, seconds: float, *needs: str) -> Step:
        out = WORK / "certificates" / name
        command = f"enginehouse certify {name} --device cuda --layout single --quick --out {out}"
        return Step(
            f"certify {name}",
            command,
            seconds,
            ("ray", "anybadge", *needs),
            skipped=_only(small, "make test has certificates"),
        )

    quick, real = WORK / "quickstart", WORK / "real"
    tests = "python3 -m pytest -v --tb=short -p no:cacheprovider -n 0 --timeout 150"
    return [
        Step(
            "kernels", f"python3 -m tools.gpu.kernels --device {size.device} {size.kernels} --out {WORK}/kernels.json",
            180, TRAINING, lambda: numbers(WORK / "kernels.json"),
            most={"gradients/float32": 1e-3, "logprobs/float32": 1e-3}
            | ({} if small else {"gradients/bfloat16 by padded": 2.0, "logprobs/bfloat16 by padded": 2.0}),
        ),
        Step(
            "tests",
            f"{tests} {'--collect-only -p tools.gpu.bare' if small else '-m gpu'} {GPU_TESTS}",
            180, (*TRAINING, *PYTEST),
        ),
        trained("in one process", f"{tokens} {inline}", 150),
        trained(
            "long passes",
            f"rollout.sampling.max_tokens={size.long_tokens} actor.engine.options.tokens_per_microbatch=81920 {inline}",
            150,
        ),
        Step(
            "memory", f"python3 -m tools.gpu.memory --device {size.device} {size.memory} --out {WORK}/memory.json",
            150, TRAINING, lambda: numbers(WORK / "memory.json"),
            least={"least planned by measured": 0.9}, most={"most planned by measured": 1.1},
        ),
        Step(
            "quickstart",
            f"python3 examples/quickstart/make_task.py && "
            f"enginehouse sft --quiet examples/quickstart/sft.yaml {inline} cluster.device=cuda "
            f"run.directory={quick}-sft run.overwrite=true && "
            f"enginehouse train examples/quickstart/grpo.yaml {inline} cluster.device=cuda "
            f"model.path={quick}-sft/model run.directory={quick} run.overwrite=true",
            150, TRAINING, lambda: last_metrics(quick, ["reward/mean"]), {"reward/mean": 0.8},
            skipped=_only(small, "make test has it whole"),
        ),
        Step(
            "real model in bfloat16",
            f"enginehouse recipes run --quiet real/grpo {inline} cluster.device=cuda run.directory={real} "
            f"run.overwrite=true",
            120, (*TRAINING, "gguf"), lambda: solved(real), {"reward/last half": 0.3, "validation": 0.4},
            skipped=_only(small, "make test-real runs it in float32"),
        ),
        Step(
            "tests of megatron", f"{tests} -m gpu {MEGATRON_TESTS}", 120,
            (*TRAINING, *PYTEST, "megatron"),
            skipped=_only(small, "make test collects them"),
        ),
        certified("torch", 120),
        certified("fsdp", 120),
        trained("in turns", f"{tokens} rollout.placement=shared", 180, ("ray",), BOTH_FREED),
        Step(
            "benchmark of the training engine",
            "python3 -m benchmarks train_engine hidden=1024 layers=16 device=cuda",
            180, (*TRAINING, "psutil"), lambda: numbers(Path("benchmarks/out/train_engine.json"), "metrics"),
            least={"fsdp_vs_bare": 0.95}, most={"fsdp_memory_vs_bare": 1.05},
            skipped=_only(small, "it is ten processes long; its figures have tests"),
        ),
        certified("vllm", 240, "vllm"),
        trained("in turns with vllm", f"{tokens} rollout.engine.backend=vllm", 240, ("ray", "vllm"), ACTOR_FREED),
        trained("in turns with sglang", f"{tokens} rollout.engine.backend=sglang", 240, ("ray", "sglang"), ACTOR_FREED),
        Step(
            "parity of fsdp and vllm",
            f"enginehouse parity {common} {tokens} rollout.engine.backend=vllm --out {WORK}/parity",
            150, (*TRAINING, "ray", "vllm"), lambda: numbers(WORK / "parity" / "parity.json"),
            skipped=_only(small, "vLLM takes a minute to start"),
        ),
    ]  # fmt: skip


def _only(small: bool, reason: str) -> str:
    return reason if small else ""


def learned(run: Path, model: Path) -> Figures:
    """Return figures that show whether the run in directory `run` trained `model`, and how long it took."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = {name: value for name, value in rows[-1].items() if name.startswith("time/") or name in TURNS}
    return last | {
        "grad_norm/least": min(row["grad_norm"] for row in rows),
        "loss/mean": sum(row["loss"] for row in rows) / len(rows),
        "mismatch/kl": max(row["mismatch/kl"] for row in rows),
        "reward/mean": rows[-1]["reward/mean"],
        "weights/changed": share_changed(model, run / "model"),
    }


def solved(run: Path) -> Figures:
    """Return the mean reward of the second half of a run's steps, and the held-out reward after the last.

    Sampled answers tell a model that learns slowly from one that learns at the rate of float32; greedy ones hardly do.
    """
    steps, validations = (
        [json.loads(line) for line in (run / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "validation.jsonl")
    )
    last = [row["reward/mean"] for row in steps[len(steps) // 2 :]]
    return {"reward/last half": sum(last) / len(last), "validation": validations[-1]["validation/reward"]}


def share_changed(before: Path, after: Path) -> float:
    """Return the fraction of a model's matrices that differ in any element between two directories."""
    import torch
    from safetensors.torch import load_file

    old, new = (
        {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        for path in (before, after)
    )
    matrices = [name for name, tensor in new.items() if tensor.dim() > 1 and name in old]
    changed = sum(not torch.equal(old[name].to(new[name].dtype), new[name]) for name in matrices)
    return changed / max(1, len(matrices))


def last_metrics(run: Path, columns: Iterable[str]) -> Figures:
    """Return these columns of a run's last step."""
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: row[name] for name in columns if name in row}


def numbers(path: Path, key: str | None = None) -> Figures:
    """Return the numbers at the top level of a JSON file, or below one of its keys."""
    content = json.loads(path.read_text())
    found = content if key is None else content[key]
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
