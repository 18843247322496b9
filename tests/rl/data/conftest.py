"""Files and tokenizers for the tests of data sets."""

import json
from pathlib import Path
from typing import Any

import pytest
from character_tokenizer import TEMPLATE, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return make_tokenizer(TEMPLATE)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """`write("a.jsonl", rows)`: rows are objects, or strings written as they are."""

    def write(name: str, rows: list[Any]) -> Path:
        path = tmp_path / name
        if name.endswith(".parquet"):
            import pyarrow as pa
            from pyarrow import parquet

            parquet.write_table(pa.Table.from_pylist(rows) if rows else pa.table({"prompt": pa.array([])}), path)
        else:
            path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return path

    return write
