"""A tool that searches a corpus on disk by BM25."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from enginehouse.errors import ConfigError


def make_search(corpus: str, k: Annotated[int, Field(ge=1)] = 3) -> Callable[[str], str]:
    """Return the tool `search`.

    Args:
        corpus: JSONL file of documents, each with a `text` and optionally a `title`.
        k: maximum number of documents in a result.

    Raises:
        ConfigError: the file does not exist, or its first line is no document.
    """
    path = str(Path(corpus).absolute())
    try:
        first = next(_read_documents(path), None)
    except OSError as error:
        raise ConfigError(f"tools: search: the corpus {corpus} cannot be read: {error.strerror or error}") from error
    if first is None:
        raise ConfigError(f"tools: search: the corpus {corpus} has no documents")

    def search(query: str) -> str:
        """Search documents for words, and return those that fit best.

        Args:
            query: A few words to look for.
        """
        return "\n\n".join(_load_index(path).search(query, k)) or "nothing was found"

    search.prepare = lambda: _load_index(path)  # type: ignore[attr-defined]
    return search


@functools.cache
def _load_index(path: str) -> _Index:
    """Return the index, which a process builds only once."""
    return _Index(path)


class _Index:
    """An index of documents by their words."""

    def __init__(self, path: str):
        import bm25s

        self._texts = [
            "\n".join(filter(None, (document.get("title"), document["text"]))) for document in _read_documents(path)
        ]
        self._bm25 = bm25s.BM25()
        self._bm25.index(bm25s.tokenize(self._texts, show_progress=False), show_progress=False)

    def search(self, query: str, k: int) -> list[str]:
        """Return the best matching texts, best first; each contains a word of the query."""
        import bm25s

        tokens = bm25s.tokenize([query], show_progress=False)
        places, scores = self._bm25.retrieve(tokens, k=min(k, len(self._texts)), show_progress=False)
        return [self._texts[place] for place, score in zip(places[0], scores[0], strict=True) if score > 0]


def _read_documents(path: str) -> Iterator[dict[str, Any]]:
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"tools: search: {path}, line {number} is no JSON: {error}") from error
            if not isinstance(document, dict) or not isinstance(document.get("text"), str):
                raise ConfigError(f'tools: search: {path}, line {number} is no object with a "text"')
            if not isinstance(document.get("title") or "", str):
                raise ConfigError(f"tools: search: {path}, line {number} has a title that is no text")
            yield document
