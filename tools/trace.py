"""Trace one step of the quickstart: our functions that it enters, and how deep a model's forward is below the command.

python -m tools.trace        # `make trace`; nothing is kept

The run is inline, in one process. Its model is random, because rewards do not change what a step enters.
"""

import argparse
import functools
import re
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[1]
QUICKSTART = "examples/quickstart/grpo.yaml"
_OURS = re.compile(rf"{re.escape(str(ROOT))}/(?:core|plugins/\w+)/src/(\w+)/")


@functools.cache
def package_of(file: str) -> str:
    """Return our package that a source file belongs to, such as `enginehouse_torch`; empty if it is not ours."""
    match = _OURS.match(file)
    return match[1] if match else ""


def class_of(code: CodeType) -> str:
    """Return the class of a method; empty if the code is no method."""
    match = re.match(r"(\w+)\.(?!<locals>)", code.co_qualname)
    return match[1] if match else ""


class Trace:
    """Notes which of our functions are entered during a call, in all threads that were started within it.

    Args:
        function: name of the function whose call is traced; of nested calls, the outermost.
        argument: name and value of an argument that tells the call from others.

    Attributes:
        entered: the functions that the call entered.
        frames: our functions on the stack, outermost first, when the call's thread first called a model.
    """

    def __init__(self, function: str, argument: tuple[str, object]):
        self.entered: set[CodeType] = set()
        self.frames: list[CodeType] = []
        self._function, self._argument = function, argument
        self._call: FrameType | None = None
        self._thread = 0

    def __enter__(self) -> "Trace":
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "return" and frame is self._call:
            self._call = None
        if event != "call":
            return
        name, value = self._argument
        if not self.entered and code.co_name == self._function and frame.f_locals.get(name) == value:
            self._call, self._thread = self._call or frame, threading.get_ident()
        if self._call is None:
            return
        if package_of(code.co_filename):
            self.entered.add(code)
        elif not self.frames and code.co_name == "_call_impl" and threading.get_ident() == self._thread:
            self.frames = _waiting(frame)  # torch.nn.Module's

    def table(self) -> str:
        """Return the figures as text, one line per package."""
        lines = [f"{'':<24}{'files':>7}{'classes':>9}{'functions':>11}{'lines of the files':>20}"]
        packages = sorted({package_of(code.co_filename) for code in self.entered})
        for name in (*packages, "all"):
            codes = [code for code in self.entered if name in ("all", package_of(code.co_filename))]
            files = {code.co_filename for code in codes}
            classes = {(code.co_filename, class_of(code)) for code in codes if class_of(code)}
            lengths = sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files)
            lines.append(f"{name:<24}{len(files):>7}{len(classes):>9}{len(codes):>11}{lengths:>20,}")
        return "\n".join(lines)


def _waiting(frame: FrameType | None) -> list[CodeType]:
    """Return our functions on the stack of a frame, outermost first."""
    if frame is None:
        return []
    return _waiting(frame.f_back) + [frame.f_code] * bool(package_of(frame.f_code.co_filename))


def main() -> None:
    """Run the quickstart up to a step, and print what that step entered."""
    parser = argparse.ArgumentParser(description="Trace one step of the quickstart.")
    parser.add_argument("--step", type=int, default=4, help="which step, from 1")
    step = parser.parse_args().step
    from enginehouse.cli.main import main as command
    from enginehouse_recipes.sorting import make_task

    with tempfile.TemporaryDirectory() as folder, Trace("run_step", ("step", step)) as trace:
        make_task(Path(folder))
        files = [f"model.path={folder}/model", f"data.train={folder}/train.jsonl", f"run.directory={folder}/run"]
        size = [f"train.steps={step + 1}", "train.prompts_per_step=8", "data.validation=null"]
        command(["train", "--quiet", QUICKSTART, "cluster.launcher=inline", *files, *size], standalone_mode=False)
    print(f"step {step} of {QUICKSTART}, inline\n{trace.table()}")
    packages = [package_of(code.co_filename) for code in trace.frames]
    names = [f"{code.co_qualname} ({package})" for code, package in zip(trace.frames, packages)]
    engine = packages.index(packages[-1]) + 1
    print(f"frames from the command to the engine: {engine}; to the model's forward: {len(names)}", *names, sep="\n  ")


if __name__ == "__main__":
    main()
