"""A model in the shape of real families, and engines that are checked with it.

Its heads have 64 dimensions, three of them share a key-value head, the output layer is tied, and its tokens lie all
over a vocabulary of 49,152.
"""

import functools
import json
from pathlib import Path
from typing import Any

from enginehouse_testing.model_under_test import ModelUnderTest
from enginehouse_testing.models import CHARACTERS, tiny_model
from enginehouse_testing.naming import record_of
from enginehouse_testing.running import certify

VOCABULARY = 49_152


@functools.cache
def real_shape() -> str:
    """Return the directory of the model, which has one layer."""
    shape = {"hidden": 96, "layers": 1, "heads": 3, "key_value_heads": 1, "head": 64, "vocabulary": VOCABULARY}
    path = tiny_model("llama", True, max_positions=2048, initializer_range=0.4, **shape)
    file = Path(path, "tokenizer.json")
    content = json.loads(file.read_text())
    for number, character in enumerate(CHARACTERS, start=1):
        content["model"]["vocab"][character] = number * (VOCABULARY // len(CHARACTERS)) - 1
    file.write_text(json.dumps(content))
    return path


def assert_conforms(kind: str, backend: str, **how: Any) -> None:
    """Check a backend with the model; `how` is as of `certify`."""
    certificate = certify(record_of(kind, backend), model=ModelUnderTest(real_shape(), title="a real shape"), **how)
    assert certificate.clean, certificate.as_markdown()
