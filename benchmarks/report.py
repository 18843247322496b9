"""Measures how soon the page of a long run opens in a browser, how large it is, and which hosts it asks.

    make bench NAME=report

It writes a run of 2,000 steps with 100 metrics each and 50,000 samples with their tokens, as runs write it. It makes
the page and opens it in chromium without a window, several times, each in a new browser. The page itself says when it
is
ready: the visible charts are drawn, and all rows of samples are in their table.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.chromium import Chromium
from enginehouse_report.page import write_report
from enginehouse_rl.runs import RunDirectory

NAMES = ("reward/mean", "reward/std", "reward/min", "reward/max", "loss", "grad_norm", "entropy", "kl", "mismatch/kl")
PHASES = ("generate", "reward", "old_logprobs", "reference", "advantage", "update", "sync")
WORDS = ["the", "sum", "of", "two", "and", "three", "is", "five", "so", "we", "take", "it", "away", "how", "many"]
CONFIG = "model: {path: models/tiny}\ntrain: {steps: 2000}\n"


def measure(
    steps: int = 2000, metrics: int = 100, samples: int = 50_000, files: int = 100, tokens: int = 120, rounds: int = 5
) -> dict[str, Any]:
    """Write a run and its page, and open the page.

    Args:
        steps: steps of the run.
        metrics: metrics of a step.
        samples: number of rows in all files.
        files: number of files of samples.
        tokens: tokens of a row.
        rounds: number of browsers that open the page.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        make_run(path, steps, metrics, samples, files, tokens)
        page = path / "report.html"
        began, cpu = time.perf_counter(), time.process_time()
        size = write_report([path], page)
        written, cpu = time.perf_counter() - began, time.process_time() - cpu
        opened = [_open(page) for _ in range(rounds)]
        sample_bytes = sum(file.stat().st_size for file in (path / "samples").iterdir())
    ready = [one["ready_seconds"] for one in opened]
    last = opened[-1]
    return {
        "metrics": {
            "open_seconds": statistics.median(ready),
            "open_seconds_max": max(ready),
            "open_cpu_seconds": statistics.median(one["busy_seconds"] for one in opened),
            "page_mb": size / 1e6,
            "write_seconds": written,
            "write_cpu_seconds": cpu,
            "sort_seconds": statistics.median(one["sort_seconds"] for one in opened),
            "scroll_frame_ms": statistics.median(one["scroll_frame_ms"] for one in opened),
            "rows_with_tokens": last["whole"],
            "heap_mb": last["heap_mb"],
            "other_hosts": len({url for one in opened for url in one["asked"]}),
        },
        "run": {"steps": steps, "metrics": metrics, "samples": samples, "samples_mb": sample_bytes / 1e6},
        "browser": last["browser"],
        "net_log": last["hosts"],
        "problems": last["problems"],
    }


def _open(page: Path) -> dict[str, Any]:
    """Open a page in a new browser, sort its table and scroll through it."""
    with Chromium() as browser:
        browser.shape(1280, 900)
        ready = browser.open(page.as_uri())
        assert browser.evaluate("samplesTable.order.length") > 0
        found = {
            "ready_seconds": ready,
            "busy_seconds": browser.busy_seconds(),
            "sort_seconds": browser.evaluate(SORT) / 1000,
            "scroll_frame_ms": browser.evaluate(SCROLL),
            "whole": browser.evaluate(
                "state.runs[0].samples.columns.get('block').filter((one) => one !== null).length"
            ),
            "heap_mb": browser.evaluate("performance.memory.usedJSHeapSize") / 1e6,
            "browser": browser.call("Browser.getVersion")["product"],
        }
    asked = [url for url in browser.asked if not url.startswith(("data:", page.as_uri()))]
    return found | {"asked": asked, "problems": browser.problems, "hosts": browser.hosts}


SORT = """(() => {
  samplesTable.kind.value = "";
  samplesTable.select();
  const began = performance.now();
  samplesTable.sortBy({ name: "reward", number: true });
  return performance.now() - began;
})()"""
SCROLL = """(async () => {
  const began = performance.now();
  for (let frame = 0; frame < 60; frame += 1) {
    samplesTable.box.scrollTop = frame * 20000;
    await new Promise(requestAnimationFrame);
  }
  return (performance.now() - began) / 60;
})()"""


def make_run(path: Path, steps: int, metrics: int, samples: int, files: int, tokens: int) -> None:
    """Write a run directory as a run does."""
    chance = random.Random(0)
    run = RunDirectory.create(path, CONFIG, command=["enginehouse", "train", "long.yaml"])
    names = [*NAMES, *(f"time/{phase}" for phase in PHASES), "time/step"]
    names += [f"other/figure_{number}" for number in range(metrics - len(names))]
    for step in range(1, steps + 1):
        run.log(step, {name: chance.random() for name in names})
        now = time.monotonic()
        for place, phase in enumerate(PHASES):
            run.timeline.span(phase, now + place * 0.001, now + (place + 1) * 0.001)
        run.timeline.span(f"step {step}", now, now + 0.01)
    rows = Rows(chance, tokens)
    for number in range(files):
        run.write_samples((number + 1) * steps // files, rows.take(samples // files))
    run.finish("finished")


class Rows:
    """Rows of samples from a store of texts and figures, because making each of them would take minutes."""

    def __init__(self, chance: random.Random, tokens: int, store: int = 500):
        self._chance = chance
        self._store = [self._tokens(tokens) for _ in range(store)]

    def _tokens(self, tokens: int) -> dict[str, list[Any]]:
        chance, prompt = self._chance, tokens // 3
        drawn = range(tokens - prompt)
        return {
            "text": [f" {chance.choice(WORDS)}" for _ in range(tokens)],
            "mask": [0] * prompt + [1 for _ in drawn],
            "logprob": [None] * prompt + [-chance.expovariate(1.0) for _ in drawn],
            "advantage": [None] * prompt + [chance.gauss(0, 1) for _ in drawn],
            "version": [None] * prompt + [chance.randrange(3) for _ in drawn],
        }

    def take(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield `count` rows."""
        for number in range(count):
            tokens = self._chance.choice(self._store)
            own = f"{self._chance.random():.12f}"
            prompt = sum(mask == 0 for mask in tokens["mask"])
            yield {
                "prompt": f"{own} {''.join(tokens['text'][:prompt])}",
                "response": f"{''.join(tokens['text'][prompt:])} {own}",
                "reward": self._chance.choice((0.0, 0.25, 1.0)),
                "finish_reason": self._chance.choice(("stop", "length")),
                "tokens": len(tokens["text"]) - prompt,
                "answer": own,
                "reward/format": self._chance.random(),
                "by_token": tokens,
                "group": number // 8,
            }
