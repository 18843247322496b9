"""Reads the rows of a config's data files before the run, as the run itself does, but for a limited time."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginehouse.errors import nearest
from enginehouse_rl.config.schema import DPOConfig, DPODataConfig, RMDataConfig
from enginehouse_rl.data.column_names import ColumnNames
from enginehouse_rl.data.conversations import open_demonstrations
from enginehouse_rl.data.files import RowProblems, Table, open_table
from enginehouse_rl.data.preference_files import PreferenceColumns, PreferenceTable
from enginehouse_rl.data.prompt_text import Where
from enginehouse_rl.data.rendering import Renderer, TokenLimit, bound_tokens, is_surely_short, join, make_length_error
from enginehouse_rl.data.sources import Source, count_by_file, make_sources, rank_values
from enginehouse_rl.plan.reward_columns import RowColumns, list_columns
from enginehouse_rl.plan.row_lengths import RowMeter, Tokenizer, TokenRow

if TYPE_CHECKING:
    from enginehouse.plugin.findings import Findings
    from enginehouse_rl.config.schema import Config, DataConfig, PreferenceConfig, SFTConfig, SFTDataConfig

READ_SECONDS = 5.0
"""Approximate number of seconds for which `plan` reads the files of a config. It reads some hundred megabytes per
second."""
REPEATED = 0.1
"""A note reports repeated prompts if they are at least this fraction of a file's prompts."""
SHARED = 0.01
"""A note reports validation prompts that are also training prompts if they are at least this fraction of the validation
prompts."""


@dataclass(frozen=True)
class RowReading:
    """The rows of a config's files, as far as they are known.

    Attributes:
        dropped: the number of rows that are dropped because they are too long.
        sampled: true if there was no time to measure all rows, so that more rows may be dropped.
        columns: the columns that the reward gets; None if a file could not be read.
        held_out: the name of each file of held-out prompts in messages, and the number of its prompts in use.
        longest: the length in tokens of the longest prompt in use; None if not all prompts were measured.
    """

    sources: Sequence[Source] = ()
    dropped: int = 0
    sampled: bool = False
    columns: tuple[RowColumns, ...] | None = None
    held_out: Sequence[tuple[str, int]] = ()
    longest: int | None = None


def look_at_prompts(findings: Findings, config: Config, limit: TokenLimit, tokenizer: Tokenizer | None) -> RowReading:
    """Read the files of prompts, and check every row as the run does when it starts.

    Args:
        limit: the maximum number of tokens of a prompt.
        tokenizer: the model's tokenizer; None if it has a problem.
    """
    data = config.data
    files = [name_files(data.train), *validation_files(config)]
    until = time.monotonic() + READ_SECONDS
    # The training files are the largest, so they come last and get the time that the others leave.
    held_tables = [_open_prompts(findings, config, paths, until) for _, paths in reversed(files[1:])][::-1]
    train = _open_prompts(findings, config, files[0][1], until, data.order_by or None)
    tables = [train, *held_tables]
    lengths: list[int | None] = []
    held_out: list[tuple[str, int]] = []
    for (name, _), table in zip(reversed(files), reversed(tables), strict=True):
        # The values of the training files remain.
        dropped, sampled, longest = _look_at_prompt_lengths(findings, config, table, name, limit, tokenizer)
        lengths.append(longest)
        if table is not None and table is not train:
            held_out.insert(0, (name, _count_used(config, table, dropped)))
    sources = [] if train is None else _look_at_training(findings, config, train, dropped, limit)
    opened = [(name, table) for (name, _), table in zip(files, tables, strict=True) if table is not None]
    if train is not None:
        (name, prompts), *others = [(name, table.needed[data.prompt]) for name, table in opened]
        _note_repeated(findings, name, prompts, others)
    if len(opened) < len(tables):
        return RowReading(sources, len(dropped), sampled)
    columns = [_list_columns(config, table, name) for name, table in opened]
    _check_by(findings, config, columns[1:])
    return RowReading(
        sources, len(dropped), sampled, tuple(itertools.chain(*columns)), held_out, _find_largest(lengths)
    )


def _look_at_training(
    findings: Findings, config: Config, train: Table, dropped: Sequence[int], limit: TokenLimit
) -> list[Source]:
    """Check that the training files have enough prompts for a step; return the sources."""
    data, needed, sources = config.data, config.train.prompts_per_step, list[Source]()
    with findings.collecting():
        sources = _list_sources(data, train, dropped)
    for source in sources:
        fraction = source.weight / sum(source.weight for source in sources)
        if fraction < 1 and source.rows < fraction * needed:
            findings.refuse(
                f"train.prompts_per_step is {needed:,}, and {fraction:.3g} of them come from {source.path}, but that "
                f"file has only {source.rows:,} prompts"
            )
    if data.order_by is not None:
        with findings.collecting():
            rank_values(train.needed[data.order_by], data.order_by, train.where)
    if (number := len(train) + train.unread - len(dropped)) < needed:
        short = f" of at most {limit.tokens} tokens" if dropped else ""
        name = name_files(data.train)[0]
        findings.refuse(f"train.prompts_per_step is {needed}, but {name} holds only {number} prompts{short}")
    return sources


def look_at_held_out(findings: Findings, config: Config, limit: TokenLimit, tokenizer: Tokenizer | None) -> RowReading:
    """Check the files of held-out prompts of an evaluation, as `look_at_prompts` does for a run."""
    until = time.monotonic() + READ_SECONDS
    held_out, columns, lengths = list[tuple[str, int]](), list[tuple[RowColumns, ...]](), list[int | None]()
    for name, paths in validation_files(config):
        table = _open_prompts(findings, config, paths, until)
        if table is None:
            return RowReading()
        dropped, _, longest = _look_at_prompt_lengths(findings, config, table, name, limit, tokenizer)
        lengths.append(longest)
        held_out.append((name, _count_used(config, table, dropped)))
        columns.append(_list_columns(config, table, name))
    _check_by(findings, config, columns)
    return RowReading(columns=tuple(itertools.chain(*columns)), held_out=held_out, longest=_find_largest(lengths))


def _count_used(config: Config, table: Table, dropped: Sequence[int]) -> int:
    """Return the number of prompts in a held-out file that the run uses."""
    rows = len(table) + table.unread - len(dropped)
    return min(rows, config.evaluation.max_prompts or rows)


def _list_columns(config: Config, table: Table, name: str) -> tuple[RowColumns, ...]:
    """Return the columns of a file's rows under the names of `data.columns`."""
    shapes = ColumnNames(config.data.columns).shapes(table.shapes())
    return tuple(list_columns(shapes, name, config.data.prompt, table.where))


def _find_largest(lengths: Sequence[int | None]) -> int | None:
    """Return the largest of some lengths; None if one of them is unknown."""
    numbers = [length for length in lengths if length is not None]
    return max(numbers, default=None) if len(numbers) == len(lengths) else None


def _check_by(findings: Findings, config: Config, held_out: Iterable[Iterable[RowColumns]]) -> None:
    """Check that held-out prompts have the column `evaluation.by`, by which metrics are grouped."""
    if (by := config.evaluation.by) is None:
        return
    for rows in itertools.chain.from_iterable(held_out):
        if by not in rows.names:
            lacks = f"evaluation.by: {rows.where} has no column {by!r} to group metrics by. "
            findings.refuse(lacks + nearest(by, rows.names))


def _list_sources(data: DataConfig | SFTDataConfig, table: Table, dropped: Sequence[int]) -> list[Source]:
    """Return the sources of the training files, without the rows that are dropped."""
    files = table.list_files()
    without = count_by_file(dropped, [len(file) for file in files])
    return make_sources(data.train, [len(file) + file.unread - out for file, out in zip(files, without, strict=True)])


def look_at_demonstrations(
    findings: Findings, config: SFTConfig, limit: TokenLimit, tokenizer: Tokenizer | None
) -> tuple[list[Source], int]:
    """Check the files of a supervised run like `look_at_prompts`; return the sources and the held-out row count."""
    data, until = config.data, time.monotonic() + READ_SECONDS
    tables = []
    for paths in (data.validation, data.train):  # the larger one last: it gets the time that the other leaves
        table, (name, listed) = None, name_files(paths or ())
        if paths:
            findings.doing(f"Reading {name}")
            with findings.collecting():
                columns = (data.prompt, data.response, data.tools, data.conversation)
                table = open_demonstrations(listed, *columns, until - time.monotonic())
                _note_unread(findings, table, name)
        if table is not None and tokenizer:
            with findings.collecting():
                meter = RowMeter(findings, data, table, name, "demonstrations", tokenizer)
                _look_at_demonstration_lengths(meter, config, limit)
        tables.append(table)
    held_out, train = tables
    sources = _list_sources(data, train, []) if train is not None else []
    return sources, 0 if held_out is None else len(held_out) + held_out.unread


def preference_columns(config: PreferenceConfig) -> PreferenceColumns:
    """Return the columns of a config's preferences."""
    data = config.data
    if isinstance(data, DPODataConfig) and isinstance(config, DPOConfig) and config.algorithm.loss == "kto":
        return PreferenceColumns(data.prompt, (data.completion,), "label", data.label, data.tools or "")
    margin = data.margin if isinstance(data, RMDataConfig) else None
    figure = "margin" if margin else ""
    return PreferenceColumns(data.prompt, (data.chosen, data.rejected), figure, margin or "", data.tools or "")


def look_at_preferences(
    findings: Findings, config: PreferenceConfig, limit: TokenLimit, tokenizer: Tokenizer | None
) -> tuple[int, int]:
    """Check the files of preferences as `look_at_prompts` does; return the numbers of training and held-out rows."""
    until = time.monotonic() + READ_SECONDS
    numbers = []
    for paths in (config.data.validation, config.data.train):
        rows, (name, listed) = 0, name_files(paths or ())
        if paths:
            findings.doing(f"Reading {name}")
            with findings.collecting():
                read = PreferenceTable(listed, preference_columns(config), until - time.monotonic())
                rows = len(read) + read.table.unread
                _note_unread(findings, read.table, name)
                problems = RowProblems()
                read.check_figures(problems)
                problems.raise_any()
                _note_alike(findings, read, name)
                if tokenizer is not None:
                    meter = RowMeter(findings, config.data, read.table, name, "preferences", tokenizer)
                    _look_at_preference_lengths(meter, read, limit)
        numbers.append(rows)
    held_out, rows = numbers
    return rows, held_out


def name_files(files: str | Iterable[str]) -> tuple[str, list[str]]:
    """Return the name of one or several files in messages, and their paths; `files` may map paths to weights."""
    paths = [files] if isinstance(files, str) else list(files)
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more files" if len(paths) > 3 else ""), paths


def validation_files(config: Config) -> list[tuple[str, list[str]]]:
    """Return the result of `name_files` for each file of held-out prompts."""
    return [name_files(path) for path in config.data.validation_files().values()]


def _open_prompts(
    findings: Findings, config: Config, paths: Sequence[str], until: float, order_by: str | None = None
) -> Table | None:
    """Open files of prompts. Return None if they have a problem, which goes to the findings."""
    data, name, names = config.data, name_files(paths)[0], ColumnNames(config.data.columns)
    findings.doing(f"Reading {name}")
    with findings.collecting():
        needed = [data.prompt, data.tools or None, *names.needed, order_by]
        table = open_table(paths, needed, until - time.monotonic())
        names.check(table)
        _note_unread(findings, table, name)
        return table
    return None


def _note_unread(findings: Findings, table: Table, name: str) -> None:
    if table.unread:
        findings.note(
            f"{len(table):,} of {len(table) + table.unread:,} rows of {name} were read; the run reads all of them "
            "before it starts any process"
        )


def _look_at_prompt_lengths(
    findings: Findings, config: Config, table: Table | None, name: str, limit: TokenLimit, tokenizer: Tokenizer | None
) -> tuple[list[int], bool, int | None]:
    """Check prompts that may be too long.

    Returns:
        The prompts to drop; true if some prompts were not measured; and the length in tokens of the longest remaining
        prompt. The length is None if some prompts were not measured, or if a problem was found.
    """
    if table is not None and tokenizer:
        with findings.collecting():
            return _measure_prompts(RowMeter(findings, config.data, table, name, "prompts", tokenizer), config, limit)
    return [], False, None


def _measure_prompts(meter: RowMeter, config: Config, limit: TokenLimit) -> tuple[list[int], bool, int | None]:
    data, table = config.data, meter.table
    prompts, tools = table.needed[data.prompt], table.needed[data.tools] if data.tools else None
    unsurely = meter.needs_tokens
    unsure = [row for row, prompt in enumerate(prompts) if unsurely or not is_surely_short(prompt, limit.tokens)]
    short = max((bound_tokens(prompts[row]) for row in set(range(len(prompts))).difference(unsure)), default=0)

    def render(renderer: Renderer, rows: Sequence[int], where: Where, problems: RowProblems) -> list[list[TokenRow]]:
        schemas = None if tools is None else [tools[row] for row in rows]
        _, ids = renderer.render_prompts([prompts[row] for row in rows], where, problems=problems, tools=schemas)
        return [[TokenRow(prompt)] for prompt in ids]

    lengths = meter.measure(unsure, lambda row: _count_characters(prompts[row]), render)
    if lengths is None:
        return [], False, None if unsure or table.unread else short
    if data.overlong_prompts == "error":
        meter.check_longest(lengths, limit, "the prompt")
    dropped = [row for row, length in lengths.items() if length > limit.tokens]
    if len(dropped) == len(prompts) and not table.unread:
        raise make_length_error(len(dropped), min(lengths.values()), limit)
    partly = not lengths.keys() >= set(unsure) or table.unread > 0
    longest = max(short, *(length for length in lengths.values() if length <= limit.tokens), 0)
    return dropped, partly, None if partly else longest


def _look_at_demonstration_lengths(meter: RowMeter, config: SFTConfig, limit: TokenLimit) -> None:
    data, table = config.data, meter.table
    prompts, responses = table.needed[data.prompt], table.needed[data.response]
    tools = table.needed[data.tools] if data.tools else None
    unsurely = meter.needs_tokens

    def is_short(row: int) -> bool:
        response = responses[row]
        plain = not unsurely and isinstance(response, str)
        return plain and is_surely_short(prompts[row], limit.tokens - len(response.encode()))

    def render(renderer: Renderer, rows: Sequence[int], where: Where, problems: RowProblems) -> list[list[TokenRow]]:
        asked, answers = [prompts[row] for row in rows], [responses[row] for row in rows]
        schemas = None if tools is None else [tools[row] for row in rows]
        rendered = renderer.render_prompts(asked, where, problems=problems, tools=schemas)
        tokenized = renderer.render_completions(asked, rendered, answers, data.response, where, problems, schemas)
        return [[TokenRow(ids, learned)] for ids, learned in zip(*join(rendered[1], tokenized), strict=True)]

    def size(row: int) -> float:
        return _count_characters(prompts[row]) + (_count_characters(responses[row]) if responses[row] else 0)

    _note_empty(meter.findings, table, data.response, meter.name)
    lengths = meter.measure([row for row in range(len(table)) if not is_short(row)], size, render)
    meter.check_longest(lengths or {}, limit, "prompt and response together")


def _look_at_preference_lengths(meter: RowMeter, table: PreferenceTable, limit: TokenLimit) -> None:
    unsurely = meter.needs_tokens

    def is_short(row: int) -> bool:
        texts = table.texts(row)
        plain = not unsurely and table.has_prompts and all(isinstance(text, str) for text in texts)
        return plain and is_surely_short(texts[0], limit.tokens - max(len(text.encode()) for text in texts[1:]))

    def render(renderer: Renderer, rows: Sequence[int], where: Where, problems: RowProblems) -> list[list[TokenRow]]:
        prompts, responses = table.tokenize(renderer, rows, problems)
        pairs = [zip(*join(prompts, column), strict=True) for column in responses]
        return [[TokenRow(*part) for part in parts] for parts in zip(*pairs, strict=True)]

    unsure = [row for row in range(len(table)) if not is_short(row)]
    lengths = meter.measure(unsure, lambda row: sum(map(_count_characters, table.texts(row))), render)
    meter.check_longest(lengths or {}, limit, "prompt and response together")


def _note_alike(findings: Findings, table: PreferenceTable, name: str) -> None:
    """Note pairs of two equal responses, because the model learns nothing from them."""
    if len(table.columns.responses) < 2:
        return
    columns = [table.table.needed[column] for column in table.columns.responses]
    equal = [row for row, (first, second) in enumerate(zip(*columns, strict=True)) if first == second]
    if equal:
        findings.note(
            f"{name}: in {len(equal):,} of the {len(table):,} pairs that were read, both responses are the same, so "
            f"these pairs teach nothing (the first is {table.table.where(equal[0])})"
        )


def _note_empty(findings: Findings, table: Table, column: str, name: str) -> None:
    """Note rows with an empty response, because the model learns from them only to end at once."""
    empty = [row for row, response in enumerate(table.needed[column]) if _is_empty(response)]
    if empty:
        findings.note(
            f"{name}: in {len(empty):,} of the {len(table):,} rows that were read, the response is empty: these rows "
            f"teach the model to end at once (the first is {table.where(empty[0])})"
        )


def _is_empty(response: Any) -> bool:
    if not isinstance(response, list):
        return response == ""
    turns = [message for message in response if isinstance(message, dict)]
    return bool(turns) and not any(turn.get("content") or turn.get("tool_calls") for turn in turns)


def _count_characters(prompt: Any) -> float:
    """Return the number of characters of a prompt; infinite for a prompt that a run would reject."""
    if isinstance(prompt, str) and prompt.strip():
        return len(prompt)
    messages = prompt if isinstance(prompt, list) else []
    contents = [message.get("content") if isinstance(message, dict) else None for message in messages]
    strings = [content for content in contents if isinstance(content, str)]
    if not strings or len(strings) < len(contents) or prompt[-1].get("role") == "assistant":
        return math.inf
    return sum(map(len, strings))


def _hash_prompts(prompts: Sequence[Any]) -> set[int]:
    """Return hashes of the prompts. This makes no copy of them, and takes a second for each 100,000 long chats."""
    return {hash(prompt if isinstance(prompt, str) else repr(prompt)) for prompt in prompts}


def _note_repeated(
    findings: Findings, train: str, prompts: Sequence[Any], held_out: Sequence[tuple[str, Sequence[Any]]]
) -> None:
    """Note that training prompts repeat each other, or that validation prompts are also training prompts."""
    trained = _hash_prompts(prompts)
    if len(prompts) - len(trained) >= REPEATED * len(prompts):
        findings.note(
            f"only {len(trained):,} of the {len(prompts):,} prompts of {train} differ; the others repeat them"
        )
    for name, others in held_out:
        distinct = _hash_prompts(others)
        shared = len(distinct & trained)
        if shared and shared >= SHARED * len(distinct):
            which = "all" if shared == len(distinct) else f"{shared:,} of {len(distinct):,}"
            findings.note(
                f"{which} validation prompts of {name} are in {train} too, so validation measures training prompts"
            )
