"""Exports the actor's model after a step, or the best model, to directories that other programs can load."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from enginehouse.data.templates import text_ends
from enginehouse.engines.model import end_ids
from enginehouse.errors import ModelError
from enginehouse.roles.device_turns import PARAMS
from enginehouse_rl.data.rendering import load_tokenizer
from enginehouse_rl.loop.checkpoint_writer import count_bytes, guard_writing
from enginehouse_rl.loop.export_comparison import compare_export

if TYPE_CHECKING:
    from enginehouse.engines.model import ModelSpec
    from enginehouse_rl.loop.loop import Loop

EXPORTS = {"merged": "export_hf", "adapter": "export_adapter"}
"""The worker method that writes each kind of export; `train.export` chooses the kinds."""


class Exports:
    """Writes the actor's model."""

    def __init__(self, run: Loop):
        self._run = run
        self._candidate: Path | None = None  # a model for `models/best`
        self._compared: set[str] = set()  # kinds of exports

    def save(self, step: int, timeout: float | None = None) -> None:
        """Export the actor's model atomically as a Hugging Face directory."""
        staged = self._export(step, self._run.run_directory.models.staging_path(step), timeout)
        with guard_writing(f"the model of step {step}", staged):
            place = self._run.run_directory.models.keep(step, staged)
        self._run.run_directory.tell("checkpoint_saved", step=step, path=str(place), what="model")

    def save_best(self, step: int, metric: str, value: float) -> None:
        """Save the actor's model to `models/best` if its validation metric is larger than the metric of the model
        there.

        If `keep_candidate` exported a model, that model is moved there, or deleted.
        """
        staged, self._candidate = self._candidate, None
        if not self._run.run_directory.models.is_best(metric, value):
            if staged is not None:
                shutil.rmtree(staged, ignore_errors=True)
            return
        if staged is None:
            staged = self._export(step, self._run.run_directory.models.best_staging_path())
        with guard_writing(f"the model of step {step}", staged):
            place = self._run.run_directory.models.keep_best(step, staged, metric, value)
        self._run.run_directory.tell("checkpoint_saved", step=step, path=str(place), what="model")

    def keep_candidate(self, step: int) -> None:
        """Export the actor's model now, because `save_best` will be called after later steps have trained the actor."""
        self._candidate = self._export(step, self._run.run_directory.models.best_staging_path())

    def _export(self, step: int, staged: Path, timeout: float | None = None) -> Path:
        kinds = {kind: staged for kind in ("merged", "adapter") if self._run.config.train.export in (kind, "both")}
        if len(kinds) == 2:
            kinds["adapter"] = staged / "adapter"
        saved = self._run.run_directory.models.newest
        expected = None if saved is None else count_bytes(saved)
        with self._run.roles.turns.on_devices(PARAMS):
            with guard_writing(f"the model of step {step}", staged, hurried=timeout is not None, expected=expected):
                for kind, place in kinds.items():
                    self._run.roles.actor.call(EXPORTS[kind], str(place), timeout=timeout)
                if "merged" in kinds and staged.is_dir():
                    name_ends(staged, self._run.roles.plans["actor"].model)
            for kind in kinds.keys() - self._compared:
                if timeout is None and staged.is_dir():  # after SIGTERM there is no time to compare
                    self._compare(kind, kinds[kind], staged)
        return staged

    def _compare(self, kind: str, place: Path, staged: Path) -> None:
        """Compare the first export of a kind with the trained model, or report why that is impossible.

        Raises:
            ExportDiffers: The export differs from the trained model; the export is deleted.
        """
        try:
            problem = compare_export(place, self._run.roles.actor, self._run.roles.plans["actor"].model)
        except Exception:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        if problem:
            what = "adapter" if kind == "adapter" else "model"
            self._run.progress.note(f"the exported {what} was not compared with the trained model: {problem}")
        self._compared.add(kind)


def name_ends(directory: Path, spec: ModelSpec) -> None:
    """Write the tokens that end a text, including the end of a turn, into an export's generation config.

    Servers then stop at these tokens. `spec` is the model from which the actor was loaded.
    """
    ends = _read_ends(spec.path, spec.trust_remote_code) if spec.head == "causal_lm" else ()
    file = directory / "generation_config.json"
    settings, config = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for path in (file, directory / "config.json")
    )
    text_config = config.get("text_config") or config
    end_tokens = end_ids(settings.get("eos_token_id"), text_config.get("eos_token_id"))
    if set(ends) <= set(end_tokens):
        return
    settings["eos_token_id"] = [*end_tokens, *(end for end in ends if end not in end_tokens)]
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@functools.cache
def _read_ends(path: str, trust_remote_code: bool) -> tuple[int, ...]:
    """Return the tokens that end a text for a model's tokenizer; empty if the model has no tokenizer."""
    try:
        return text_ends(load_tokenizer(path, trust_remote_code))
    except ModelError:
        return ()
