"""Converts models in GGUF files to model directories, because engines read only safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from enginehouse_rl.config.schema import AnyConfig
from enginehouse_rl.plan.parts.draft import Part
from enginehouse_rl.plan.parts.hub import map_model_paths, replace_models


class GgufPart(Part[AnyConfig]):
    """Replaces GGUF files by model directories, for all parts that settle later.

    Attributes:
        entries: the entry of each converted model, for `run.json`.
    """

    entries: tuple[Mapping[str, Any], ...] = ()

    def settle(self) -> None:
        from enginehouse_rl.hub.gguf import find_gguf, make_model

        directories: dict[str, str] = {}
        entries: list[Mapping[str, Any]] = []
        for key, path in map_model_paths(self.config).items():
            key_shown = self.run.model_key if key == "model.path" else key
            with self.findings.collecting():
                if (file := find_gguf(path, key_shown)) is None:
                    continue
                model = make_model(file, key_shown, self.findings.doing)
                directories[key] = str(model.directory)
                self.run.short_paths[directories[key]] = path
                self.note(f"{key_shown}: {file} is {model.words}; all engines and exports use the dequantized weights")
                entries.append(
                    {
                        "key": key_shown,
                        "file": os.path.abspath(file),
                        "sha256": model.digest,
                        "types": list(model.types),
                        "dequantized_to": "float32",
                        "directory": directories[key],
                    }
                )
        self.findings.raise_problems(self.run.source)  # nothing more can be said of a model that is not here
        self.run.config, self.entries = replace_models(self.config, directories), tuple(entries)
