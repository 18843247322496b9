"""List figures in the checkout that were measured with older code than the present code, by the commits they name.

python -m tools.stamps        # one line each; it never fails, because an old figure is no error
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINES = (
    "core/src/enginehouse/engines",
    "core/src/enginehouse/weights",
    *(f"plugins/{name}/src" for name in ("fsdp", "megatron", "sglang", "torch", "vllm")),
)
LOOP = ("plugins/rl/src/enginehouse_rl", "core/src/enginehouse/controller", "plugins/torch/src")
MEASURES = {
    "docs/compatibility.json": ENGINES,
    "benchmarks/results/adapter_update.json": ENGINES,
    "benchmarks/results/adapter_update_sglang.json": ENGINES,
    "benchmarks/results/dispatch.json": ("core/src/enginehouse/controller", "core/src/enginehouse/data"),
    "benchmarks/results/episodes.json": ("plugins/rl/src/enginehouse_rl", "plugins/environments/src"),
    "benchmarks/results/games.json": ("plugins/rl/src/enginehouse_rl", "plugins/environments/src"),
    "benchmarks/results/report.json": ("plugins/report/src",),
    "benchmarks/results/rollout_engine.json": ("plugins/vllm/src",),
    "benchmarks/results/rollout_engine_sglang.json": ("plugins/sglang/src",),
    "benchmarks/results/startup.json": ("core/src/enginehouse/cli", "core/src/enginehouse/plugin"),
    "benchmarks/results/train_engine.json": ("plugins/torch/src", "plugins/fsdp/src", "plugins/megatron/src"),
    "benchmarks/results/transports.json": ("core/src/enginehouse/weights",),
    "benchmarks/results/weight_update.json": ENGINES,
}
"""The code that each figure measures; a result that is not listed here measures `LOOP`."""


def stale(root: Path = ROOT) -> Iterator[str]:
    """Yield a line for each measurement whose code has changed since its commit."""
    results = sorted(path.relative_to(root).as_posix() for path in root.glob("benchmarks/results/*.json"))
    for name in ("docs/compatibility.json", *results):
        found = json.loads((root / name).read_text(encoding="utf-8"))
        commit, written = str(found.get("commit", "")).rstrip("+"), str(found.get("written", ""))[:10]
        if not commit:
            yield f"{name} does not say which commit it is of"
            continue
        paths = [f":(glob){path}/**" for path in MEASURES.get(name, LOOP)]
        command = ["git", "diff", "--name-only", commit, "--", *paths]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if changed := done.stdout.splitlines() if done.returncode == 0 else []:
            yield f"{name} is of {commit[:8]}, {written}: {len(changed)} files of what it measures have changed since"


if __name__ == "__main__":
    for line in stale():
        print(f"warning: {line}")
