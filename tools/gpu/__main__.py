"""Run everything that needs a GPU: `make test-gpu`. The results go to `benchmarks/results/gpu/DEVICE.json`.

    python -m tools.gpu                                    # all steps, in at most 45 minutes
    python -m tools.gpu --model path/to/Qwen3-0.6B         # real weights; unset: random ones of its shapes
    python -m tools.gpu --step tests --step "in turns"
    python -m tools.gpu --bare --out OUT                   # on a machine with a card, torch, and not much else
    python -m tools.gpu --rehearse                         # all steps small on a CPU: whether they can fail, and pass

A step is a command that anyone can run, with the modules it needs, a time limit and the accepted range of its figures.
The time left for all steps limits it too. `--prepare` only makes the steps' model and data. The results are written
again after each step, so that nothing is lost. Exit codes: 0 every chosen step passed (with `--bare`: every one
whose needs are met); 1 a step failed, or no time was left for it; 2 there is no GPU here, or no such step.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

from tools.gpu.running import forked, in_a_shell, preload, run_all
from tools.gpu.steps import LARGE, SMALL, TASK, WORK, Size, slug, steps

ROOT = Path(__file__).parents[2]
RESULTS = Path("benchmarks/results/gpu")
MINUTES = 45.0


def make_model(path: Path, size: Size) -> None:
    """Write a model with random weights, of the shapes of Qwen3-0.6B or tiny; its tokens are characters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from enginehouse_recipes.sorting import VOCABULARY, make_tokenizer

    shape: dict[str, Any] = {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    } if size.device == "cuda" else {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    }  # fmt: skip
    others = (chr(0x10000 + number) for number in range(shape["vocab_size"] - len(VOCABULARY)))
    tokenizer = make_tokenizer((*VOCABULARY, *others))
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, max_position_embeddings=40960, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    dtype = torch.bfloat16 if size.device == "cuda" else torch.float32
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # on one core this takes a minute
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)


def prepare(size: Size) -> None:
    """Make the steps' prompts and, unless it exists, the model."""
    from enginehouse_recipes.sorting import make_data

    WORK.mkdir(parents=True, exist_ok=True)
    make_data(TASK)
    if not size.model.exists():
        make_model(size.model, size)


FACTS = """
import json, torch
one = torch.cuda.get_device_properties(0)
nccl = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps({"device": one.name, "gib": round(one.total_memory / 2**30, 1), "torch": torch.__version__,
                  "cuda": torch.version.cuda, "nccl": nccl}))
"""


def interpreters() -> dict[str, dict[str, Any]]:
    """Return what this Python environment and each runtime see of the GPU; an NCCL group needs the same NCCL in all."""
    from enginehouse.runtimes.store import runtimes_folder

    found = {}
    for python in [Path(sys.executable), *sorted(runtimes_folder().glob("*/bin/python"))]:
        asked = subprocess.run([python, "-c", FACTS], capture_output=True, text=True, timeout=120)
        if asked.returncode == 0:
            name = "driver" if python == Path(sys.executable) else python.parents[1].name
            found[name] = json.loads(asked.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="directory of Qwen3-0.6B; unset: random weights of its shapes")
    parser.add_argument("--step", action="append", metavar="NAME", help="only this step; may be repeated")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"the longest all may take (default {MINUTES:g})"
    )
    parser.add_argument("--bare", action="store_true", help="leave out what needs a module that is not here")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of the results (default {RESULTS})")
    parser.add_argument("--rehearse", action="store_true", help="run the steps small on a CPU: no GPU is needed")
    parser.add_argument("--prepare", action="store_true", help="make the model and data of the steps, and run none")
    parser.add_argument("--list", action="store_true", help="list the steps and their commands, and run none")
    given = parser.parse_args(arguments)
    out = given.out if given.out == RESULTS else given.out.absolute()
    os.chdir(ROOT)
    size = SMALL if given.rehearse else LARGE
    if given.model:
        size = dataclasses.replace(size, model=given.model)
    known = {step.name: step for step in steps(size)}
    if unknown := [name for name in given.step or () if name not in known]:
        parser.error(f"there is no step {unknown[0]!r}; there are: {', '.join(known)}")
    chosen = [known[name] for name in given.step or known]
    if given.list:
        for step in chosen:
            print(f"{step.name} (at most {step.seconds:g} s; needs {', '.join(step.needs)})\n  {step.command}")
        return 0
    if given.prepare:
        prepare(size)
        return 0
    if given.rehearse:
        preload()
        prepare(size)
        return 0 if run_all(chosen, {}, WORK / "rehearsal.json", given.minutes, bare=given.bare, wait=forked) else 1
    found = interpreters()
    if "driver" not in found:
        print(
            f"no GPU that torch can use is visible here ({sys.executable}): this runs what needs one. Where there is "
            "one, `nvidia-smi` lists it, and torch has to be a CUDA build",
            file=sys.stderr,
        )
        return 2
    WORK.mkdir(parents=True, exist_ok=True)
    if any(str(TASK) in step.command for step in chosen):
        prepare(size)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = found["driver"]["device"]
    facts = {"device": device, "weights": "given" if given.model else "random", "commit": commit,
             "machine": machine(), "interpreters": found}  # fmt: skip
    path = out / f"{slug(device)}.json"
    passed = run_all(chosen, facts, path, given.minutes, bare=given.bare, wait=in_a_shell)
    print(f"written to {path}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
