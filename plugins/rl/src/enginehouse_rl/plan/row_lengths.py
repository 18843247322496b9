"""Measures rows in tokens before a run, for a limited time, and shows the first row of each file."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse_rl.data.files import RowProblems, Table
from enginehouse_rl.data.prompt_text import Where
from enginehouse_rl.data.rendering import Renderer, TokenLimit, check_length, load_tokenizer
from enginehouse_rl.plan.tokenizers import read_tokens

if TYPE_CHECKING:
    from enginehouse.plugin.findings import Findings
    from enginehouse_rl.config.schema import AnyConfig, DataConfig, PreferenceDataConfig, SFTDataConfig

LENGTHS_SECONDS = 3.0
"""Approximate time for which `plan` tokenizes the rows of each file, once the tokenizer is loaded."""
_ROWS_AT_ONCE = 512
_SAMPLED = 500
"""Number of evenly spread rows of a file whose lengths are shown if not all rows are measured."""
_SHOWN = 24
"""Number of tokens that are shown from the start and from the end of a row."""


class Tokenizer:
    """The model's tokenizer. It is loaded when it is first used, because loading imports torch.

    Attributes:
        shows: true if the first row of each file and the lengths of rows are always shown.
        embeddings: the number of tokens for which the model has an embedding; None if unknown.
    """

    def __init__(self, findings: Findings, config: AnyConfig, shows: bool = False):
        self.shows = shows
        self.embeddings: int | None = None
        self._findings, self._model, self._arguments = findings, config.model, config.data.template_arguments
        self._tokenizer: Any = None
        self._failed = False
        self._beyond = ""

    def __call__(self) -> Any:
        """Return the tokenizer; None if it cannot be loaded, which is reported only once."""
        if self._tokenizer is None and not self._failed:
            self._failed = True
            with self._findings.collecting():
                self._tokenizer = load_tokenizer(self._model.path, self._model.trust_remote_code, self._arguments)
        return self._tokenizer

    @cached_property
    def has_more(self) -> bool:
        """True if the tokenizer has tokens for which the model has no embedding."""
        if self.embeddings is None:
            return False
        tokens = read_tokens(self._model.path, self._model.trust_remote_code)
        return tokens is not None and max(tokens.strings, default=0) >= self.embeddings

    def check(self, ids: np.ndarray, where: str, problems: RowProblems) -> None:
        """Add a problem if the model has no embedding for a token of a row."""
        if self.has_more and (unknown := ids[ids >= self.embeddings]).size:
            self._beyond = self._beyond or f"{unknown[0]}, {self._tokenizer.decode([unknown[0]])!r}"
            problems.add_alike(
                where,
                f"the model has no embedding for a token, such as {self._beyond}: it has {self.embeddings:,} "
                "embeddings, but its tokenizer has more tokens. Add embeddings to the model "
                "(resize_token_embeddings of transformers), or remove such tokens from the data",
            )


@dataclass(frozen=True)
class TokenRow:
    """The tokens of a row as the model gets them, and a mask of the trained tokens; a prompt has no mask."""

    ids: np.ndarray
    learned: np.ndarray | None = None

    @property
    def is_empty(self) -> bool:
        """True if the row has no tokens or, unless it is a prompt, no trained tokens."""
        return not (len(self.ids) if self.learned is None else self.learned.any())

    def show(self, tokenizer: Any) -> str:
        """Return the tokens as text, with the trained tokens in double brackets."""
        pieces = [repr(tokenizer.decode([number]))[1:-1] for number in self.ids.tolist()]
        if self.learned is not None:
            marks = np.flatnonzero(np.diff(np.concatenate(([False], self.learned, [False])).astype(np.int8)))
            for start, end in marks.reshape(-1, 2).tolist():
                pieces[start], pieces[end - 1] = f"[[{pieces[start]}", f"{pieces[end - 1]}]]"
        cut = pieces if len(pieces) <= 2 * _SHOWN else [*pieces[:_SHOWN], "...", *pieces[-_SHOWN:]]
        learned = "" if self.learned is None else f", of which the {self.learned.sum()} in [[ ]] are learned"
        return f"{len(pieces)} tokens{learned}: {'|'.join(cut)}"


Render = Callable[[Renderer, Sequence[int], Where, RowProblems], Sequence[Sequence[TokenRow]]]
"""Function that renders each row as one or more `TokenRow`s. Its last two arguments name rows, and collect problems."""


@dataclass(frozen=True)
class RowMeter:
    """Measures the rows of a table.

    Attributes:
        findings: gets notes, and the facts to show.
        name: the name of the table's files in messages.
        noun: the kind of rows: `"prompts"`.
    """

    findings: Findings
    data: DataConfig | SFTDataConfig | PreferenceDataConfig
    table: Table
    name: str
    noun: str
    tokenizer: Tokenizer

    @property
    def needs_tokens(self) -> bool:
        """True if rows must be tokenized: the length of a text does not bound its number of tokens, or the model may
        lack an embedding for a token."""
        data = self.data
        renders = data.chat_template or data.system is not None or data.tools or data.template_arguments
        return bool(renders) or self.tokenizer.has_more

    def measure(self, unsure: list[int], size: Callable[[int], float], render: Render) -> dict[int, int] | None:
        """Return the lengths of rows in tokens by the index of the row, in ascending order of the indices.

        If lengths are to be shown, a sample of all rows is measured first. Then as many rows of `unsure` are measured
        as there is time for, beginning with the largest, which are the most likely to be too long.

        Args:
            unsure: the indices of the rows that may be too long.
            size: estimates the size of a row; infinite for a row of an unexpected type.
            render: turns rows into tokens.

        Returns:
            The length of the longest `TokenRow` of each row. None if there is nothing to measure, or if the tokenizer
            cannot be loaded.

        Raises:
            DataError: a row cannot be rendered, or has a token without an embedding.
        """
        firsts, sample = self._pick_rows()
        if not (unsure or sample) or (loaded := self.tokenizer()) is None:
            return None
        renderer, problems = Renderer(loaded, self.data.chat_template, self.data.system), RowProblems()

        def measure(rows: Sequence[int]) -> list[int]:
            lengths = []
            rendered = render(renderer, rows, lambda index: self.table.where(rows[index]), problems)
            for row, tokens in zip(rows, rendered, strict=True):
                for part in tokens:
                    self.tokenizer.check(part.ids, self.table.where(row), problems)
                    if row in firsts and not part.is_empty:
                        self.findings.seen.append(("first row", f"{self.table.where(row)}, {part.show(loaded)}"))
                lengths.append(max(len(part.ids) for part in tokens))
            return lengths

        lengths = self._measure_in_time(unsure, sample, size, measure)
        problems.raise_any()
        if renderer.merged:
            self.findings.note(
                f"{self.name}: in {renderer.merged:,} responses of the {len(lengths):,} rows that were tokenized, "
                "the tokenizer joins the end of the prompt and the beginning of the response in one token. Training "
                "tokenizes prompt and response separately, because in generation a model gets only the prompt"
            )
        return lengths

    def check_longest(self, lengths: Mapping[int, int], limit: TokenLimit, noun: str) -> None:
        """Check the measured rows against a limit.

        Raises:
            DataError: a row is longer than the limit.
        """
        rows = list(lengths)
        check_length(list(lengths.values()), limit, noun, lambda index: self.table.where(rows[index]))

    def _pick_rows(self) -> tuple[list[int], list[int]]:
        """Return the first row of each file, and a sample of rows to measure first. The sample is empty if no
        rows are to be shown."""
        sizes = [len(file) for file in self.table.list_files()]
        firsts = [start for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False) if size]
        if not self.tokenizer.shows or self.findings.problems:
            return firsts, []
        spread = range(0, len(self.table), max(1, -(-len(self.table) // _SAMPLED)))
        return firsts, list(dict.fromkeys([*firsts, *spread]))

    def _measure_in_time(
        self,
        unsure: list[int],
        sample: list[int],
        size: Callable[[int], float],
        measure: Callable[[Sequence[int]], list[int]],
    ) -> dict[int, int]:
        """Measure the rows of `sample`, then as many of `unsure` as time allows; report how many were measured."""
        number, noun, name = len(self.table), self.noun, self.name
        self.findings.doing(f"Looking at the {noun} of {name}")
        largest = sorted(set(unsure).difference(sample), key=size, reverse=True)
        lengths: dict[int, int] = {}
        until = time.monotonic() + LENGTHS_SECONDS
        later = [largest[at : at + _ROWS_AT_ONCE] for at in range(0, len(largest), _ROWS_AT_ONCE)]
        for rows in [sample, *later] if sample else later:
            lengths.update(zip(rows, measure(rows), strict=True))
            if time.monotonic() > until:
                break
        looked = number - len(set(unsure).difference(lengths))
        if looked < number:
            self.findings.note(
                f"the lengths of {looked:,} of {number:,} {noun} of {name} were checked, beginning with the longest "
                "texts; the run checks all of them before it starts any process"
            )
        shown = [*lengths.values()] if len(lengths) == number else [lengths[row] for row in sample]
        if shown:
            half, most, longest = np.percentile(shown, (50, 95, 100), method="nearest").tolist()
            which = f"{number:,}" if len(shown) == number else f"{len(shown):,} of {number:,}"
            words = f"of {which} {noun} of {name}: median {half:,} tokens, 95 % up to {most:,}, longest {longest:,}"
            self.findings.seen.append(("lengths", words))
        return dict(sorted(lengths.items()))
