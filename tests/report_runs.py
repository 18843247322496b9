"""Run directories as runs write them, without a run; and what a page of them holds, read back."""

import base64
import gzip
import json
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from enginehouse_rl.runs import RunDirectory

CONFIG = """\
model: {path: models/tiny}
algorithm: {advantage: {name: grpo}, loss: {name: clipped_policy}}
actor: {engine: {backend: torch, options: {lr: 0.001}, env: {TOKEN: hush}}}
train: {steps: 10, staleness: 1}
"""


def sample(number: int, **more: Any) -> dict[str, Any]:
    """A row of samples/ with its tokens: two of the prompt, then three of the policy's."""
    texts = [f"{number}", "+1=", "a", "b", "\n"]
    return {
        "prompt": "".join(texts[:2]),
        "response": "".join(texts[2:]),
        "reward": number / 10,
        "finish_reason": "stop",
        "tokens": 3,
        "reward/length": 3.0,
        "by_token": {
            "text": texts,
            "mask": [0, 0, 1, 1, 1],
            "logprob": [None, None, -0.5, -1.25, -2.0],
            "advantage": [None, None, 0.1, -0.1, 0.0],
            "version": [None, None, 1, 1, 2],
        },
    } | more


def make_run(path: Path, steps: int = 3, config: str = CONFIG, **details: Any) -> RunDirectory:
    """A run that has taken some steps, with a validation and samples of each."""
    run = RunDirectory.create(path, config, command=["/bin/enginehouse", "train", "grpo.yaml"], **details)
    run.record.update(roles={"actor": [{"node": "a", "backend": "torch", "torch": "2.13.0+cpu", "device": "cpu"}]})
    for step in range(1, steps + 1):
        take_step(run, step)
    return run


def take_step(run: RunDirectory, step: int) -> None:
    """Write what a step writes."""
    began = time.monotonic() + step  # a second apart, however quickly they are written
    run.timeline.span("update", began, began + 0.01)
    run.timeline.span(f"step {step}", began, began + 0.02)
    run.flush()
    run.log(step, {"reward/mean": step / 10, "entropy": 1.0 / step, "critic/loss": 0.123456789, "time/step": 0.02})
    run.log_validation(step, {"validation/reward": step / 20})
    run.write_samples(step, [sample(number) for number in range(4)])


class Page(HTMLParser):
    """A page as a browser takes it apart.

    Attributes:
        blocks: its data, decoded, by name.
        tags: its elements' names and attributes.
    """

    def __init__(self, text: str):
        super().__init__()
        self.blocks: dict[str, Any] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        name = dict(attrs).get("id") or ""
        self._inside = name.removeprefix("block-") if name.startswith("block-") else None

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside is not None:
            self.blocks[self._inside] = json.loads(gzip.decompress(base64.b64decode(data)))

    def whole_row(self, place: int, run: int = 0) -> dict[str, Any] | None:
        """A row of the table of samples with all the page has of it."""
        columns = self.blocks[f"samples-{run}"]["columns"]
        block = columns["block"][place]
        return None if block is None else self.blocks[f"rows-{run}-{block}"][columns["at"][place]]


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))
