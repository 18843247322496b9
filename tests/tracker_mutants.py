"""Trackers with one property broken each: what their suite exists to find."""

import json
import math
import threading


def read(directory):
    """What `Right` wrote."""
    there = {}
    if (directory / "lines.jsonl").exists():
        for line in (directory / "lines.jsonl").read_text().splitlines():
            step, metrics = json.loads(line)
            for name, value in metrics.items():
                there.setdefault(name, []).append((step, value))
    return there


class Right:
    """A line each time."""

    mode = "a"

    def start(self, run):
        self.run = run
        self.file = (run.directory / "lines.jsonl").open(self.mode)

    def log(self, step, metrics, kind):
        self.file.write(json.dumps([step, dict(metrics)]) + "\n")

    def finish(self, outcome):
        self.file.close()


class NeverWrites(Right):
    def log(self, step, metrics, kind):
        pass


class ForgetsValidations(Right):
    def log(self, step, metrics, kind):
        if kind == "train":
            super().log(step, metrics, kind)


class BeginsAnew(Right):
    mode = "w"


class RefusesNumbers(Right):
    def log(self, step, metrics, kind):
        if not all(map(math.isfinite, metrics.values())):
            raise ValueError("out of range float values are not JSON compliant")
        super().log(step, metrics, kind)


class EndsWellOnly(Right):
    def finish(self, outcome):
        if outcome == "failed":
            raise KeyError(outcome)
        super().finish(outcome)


class TakesAThousand(Right):
    """And then no more."""

    def start(self, run):
        super().start(run)
        self.left = 1000

    def log(self, step, metrics, kind):
        self.left -= 1
        if self.left >= 0:
            super().log(step, metrics, kind)


class Hangs(Right):
    def finish(self, outcome):
        threading.Event().wait()
