"""Looks at the rows of a config's data files before the run, as the run reads them but within a time."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse.errors import ConfigError, UserError, nearest
from enginehouse.plugin.records import keywords, resolve
from enginehouse_rl.config.schema import DPOConfig, DPODataConfig, RMDataConfig
from enginehouse_rl.data.column_names import ColumnNames
from enginehouse_rl.data.conversations import open_demonstrations
from enginehouse_rl.data.files import RowProblems, Shape, Table, open_table
from enginehouse_rl.data.preference_files import PreferenceColumns, PreferenceTable
from enginehouse_rl.data.rendering import (
    Renderer,
    TokenLimit,
    bound_tokens,
    check_length,
    is_surely_short,
    join,
    load_tokenizer,
    make_length_error,
)
from enginehouse_rl.data.sources import Source, count_by_file, make_sources, rank_values
from enginehouse_rl.plan.arguments import check_call
from enginehouse_rl.plan.tokenizers import read_tokens

if TYPE_CHECKING:
    from enginehouse.plugin.findings import Findings
    from enginehouse_rl.config.schema import (
        AnyConfig,
        Config,
        DataConfig,
        PreferenceConfig,
        PreferenceDataConfig,
        SFTConfig,
        SFTDataConfig,
    )
    from enginehouse_rl.plan.rewards import RewardPlan

READ_SECONDS = 5.0
"""About how long `plan` reads a config's files; a second reads some hundred megabytes."""
LENGTHS_SECONDS = 3.0
"""About how long it tokenizes rows of each, once the tokenizer is loaded."""
REPEATED = 0.1
"""Share of prompts that stand in a file more than once, from which on that is noted."""
SHARED = 0.01
"""Share of validation prompts that are trained on, from which on that is noted."""
_ROWS_AT_ONCE = 512
_SAMPLED = 500
"""Rows of a file, evenly spread, by which lengths are told where not all are looked at."""
_SHOWN = 24
"""Tokens at the beginning and at the end of a row that are shown."""


@dataclass(frozen=True)
class RowColumns:
    """Rows whose columns a reward gets.

    Attributes:
        where: the name of the rows in messages.
        names: the columns, without the prompt.
    """

    where: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class RowReading:
    """The rows of a config's files, as far as they are known.

    Attributes:
        sources: what is drawn from, with which weights.
        dropped: rows that are left out because they are too long.
        sampled: whether there was no time to look at all lengths, so that more may be left out.
        columns: what the reward gets; None where a file could not be read.
        held_out: the name in messages of each file of held-out prompts, and how many of it are used.
        longest: tokens of the longest prompt that is used, at most; None where not all were looked at.
    """

    sources: Sequence[Source] = ()
    dropped: int = 0
    sampled: bool = False
    columns: tuple[RowColumns, ...] | None = None
    held_out: Sequence[tuple[str, int]] = ()
    longest: int | None = None


class Tokenizer:
    """The model's tokenizer, loaded when it is first called for: that imports torch.

    Attributes:
        shows: whether the first row of each file, and how long rows are, is to be shown in any case.
        embeddings: how many tokens the model has a row for; None where that is not known.
    """

    def __init__(self, findings: Findings, config: AnyConfig, shows: bool = False):
        self.shows = shows
        self.embeddings: int | None = None
        self._findings, self._model, self._arguments = findings, config.model, config.data.template_arguments
        self._tokenizer: Any = None
        self._failed = False
        self._beyond = ""

    def __call__(self) -> Any:
        """Return the tokenizer; None if it cannot be loaded, which is a finding once."""
        if self._tokenizer is None and not self._failed:
            self._failed = True
            with self._findings.collecting():
                self._tokenizer = load_tokenizer(self._model.path, self._model.trust_remote_code, self._arguments)
        return self._tokenizer

    @cached_property
    def has_more(self) -> bool:
        """True if the tokenizer knows tokens that the model has no embedding for."""
        if self.embeddings is None:
            return False
        tokens = read_tokens(self._model.path, self._model.trust_remote_code)
        return tokens is not None and max(tokens.strings, default=0) >= self.embeddings

    def check(self, ids: np.ndarray, where: str, problems: RowProblems) -> None:
        """Find a token of a row that the model has no embedding for."""
        if self.has_more and (beyond := ids[ids >= self.embeddings]).size:
            self._beyond = self._beyond or f"{beyond[0]}, {self._tokenizer.decode([beyond[0]])!r}"
            problems.add_alike(
                where,
                f"a token has no embedding, as {self._beyond}: the model has {self.embeddings:,}, and its tokenizer "
                "knows more tokens. Give the model rows for them (transformers' resize_token_embeddings), or leave "
                "them out of the data",
            )


@dataclass(frozen=True)
class _Looked:
    """A row as the model gets it: its tokens, and which are learned; None: a prompt, of which none is."""

    ids: np.ndarray
    learned: np.ndarray | None = None


def _show(findings: Findings, tokenizer: Any, where: str, row: _Looked) -> None:
    """Say in the plan what the first row of a file is, token by token; what is learned stands in double brackets."""
    pieces = [repr(tokenizer.decode([number]))[1:-1] for number in row.ids.tolist()]
    if row.learned is not None:
        marks = np.flatnonzero(np.diff(np.concatenate(([False], row.learned, [False])).astype(np.int8)))
        for start, end in marks.reshape(-1, 2).tolist():
            pieces[start], pieces[end - 1] = f"[[{pieces[start]}", f"{pieces[end - 1]}]]"
    cut = pieces if len(pieces) <= 2 * _SHOWN else [*pieces[:_SHOWN], "...", *pieces[-_SHOWN:]]
    taught = "" if row.learned is None else f", learned are the {row.learned.sum()} in [[ ]]"
    findings.seen.append(("first row", f"{where}, {len(pieces)} tokens{taught}: {'|'.join(cut)}"))


def _find_first_rows(findings: Findings, table: Table, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the first row of each file, and the rows to look at before all others if anything is to be shown."""
    sizes = [len(file) for file in table.list_files()]
    firsts = [start for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False) if size]
    spread = range(0, len(table), max(1, -(-len(table) // _SAMPLED)))
    return firsts, list(dict.fromkeys([*firsts, *spread])) if tokenizer.shows and not findings.problems else []


def look_at_prompts(findings: Findings, config: Config, limit: TokenLimit, tokenizer: Tokenizer | None) -> RowReading:
    """Read the files of prompts, and check every row as the run does when it starts.

    Args:
        limit: the most tokens of a prompt.
        tokenizer: the model's; None if there is none.
    """
    data = config.data
    files = [name_files(data.train), *validation_files(config)]
    until = time.monotonic() + READ_SECONDS
    # The training files are the largest, so they come last and get what time the others left.
    names = ColumnNames(data.columns)
    needed = [data.prompt, *([data.tools] if data.tools else []), *names.needed]
    held_tables = [_open(findings, paths, needed, until, names) for _, paths in reversed(files[1:])][::-1]
    train = _open(findings, files[0][1], [*needed, *([data.order_by] if data.order_by else [])], until, names)
    tables = [train, *held_tables]
    dropped: list[int] = []
    sampled = False
    lengths: list[int | None] = []
    held_out: list[tuple[str, int]] = []
    for (name, _), table in zip(reversed(files), reversed(tables), strict=True):
        dropped, sampled, longest = [], False, None  # of the training files, in the end
        if table is not None and tokenizer:
            with findings.collecting():
                dropped, sampled, longest = _look_at_prompt_lengths(findings, config, table, name, limit, tokenizer)
        lengths.append(longest)
        if table is not None and table is not train:
            used = len(table) + table.unread - len(dropped)
            held_out.insert(0, (name, min(used, config.evaluation.max_prompts or used)))
    sources = [] if train is None else _look_at_training(findings, config, train, dropped, limit)
    if train is not None:
        prompts = [
            (name, table.needed[data.prompt])
            for (name, _), table in zip(files, tables, strict=True)
            if table is not None
        ]
        _note_repeated(findings, *prompts[0], prompts[1:])
    if any(table is None for table in tables):
        return RowReading(sources, len(dropped), sampled)
    columns = [
        rows
        for (name, _), table in zip(files, tables, strict=True)
        if table is not None
        for rows in list_columns(names.shapes(table.shapes()), name, data.prompt, table.where)
    ]
    _check_by(findings, config, columns[len(train.shapes()) if train is not None else 0 :])
    return RowReading(sources, len(dropped), sampled, tuple(columns), held_out, _find_largest(lengths))


def _look_at_training(
    findings: Findings, config: Config, train: Table, dropped: Sequence[int], limit: TokenLimit
) -> list[Source]:
    """Check that the training files have prompts enough for a step; return what is drawn from."""
    data, needed, sources = config.data, config.train.prompts_per_step, list[Source]()
    with findings.collecting():
        sources = _list_sources(data, train, dropped)
    for source in sources:
        share = source.weight / sum(other.weight for other in sources)
        if share < 1 and source.rows < share * needed:
            findings.refuse(
                f"train.prompts_per_step is {needed}, and {share:.3g} of them are drawn from {source.path}, which "
                f"holds only {source.rows} prompts"
            )
    if data.order_by is not None:
        with findings.collecting():
            rank_values(train.needed[data.order_by], data.order_by, train.where)
    if (number := len(train) + train.unread - len(dropped)) < needed:
        short = f" of at most {limit.tokens} tokens" if dropped else ""
        name = name_files(data.train)[0]
        findings.refuse(f"train.prompts_per_step is {needed}, and {name} holds only {number} prompts{short}")
    return sources


def look_at_held_out(findings: Findings, config: Config, limit: TokenLimit, tokenizer: Tokenizer | None) -> RowReading:
    """Do as `look_at_prompts` for an evaluation, which reads the files of held-out prompts alone."""
    data, until = config.data, time.monotonic() + READ_SECONDS
    held_out, columns, lengths = list[tuple[str, int]](), list[RowColumns](), list[int | None]()
    names = ColumnNames(data.columns)
    needed = [data.prompt, *([data.tools] if data.tools else []), *names.needed]
    for name, paths in validation_files(config):
        table = _open(findings, paths, needed, until, names)
        if table is None:
            return RowReading()
        dropped, longest = list[int](), None
        if tokenizer:
            with findings.collecting():
                dropped, _, longest = _look_at_prompt_lengths(findings, config, table, name, limit, tokenizer)
        lengths.append(longest)
        used = len(table) + table.unread - len(dropped)
        held_out.append((name, min(used, config.evaluation.max_prompts or used)))
        columns += list_columns(names.shapes(table.shapes()), name, data.prompt, table.where)
    _check_by(findings, config, columns)
    return RowReading(columns=tuple(columns), held_out=held_out, longest=_find_largest(lengths))


def _find_largest(lengths: Sequence[int | None]) -> int | None:
    """Return the largest of some lengths; None where one of them is not known."""
    numbers = [length for length in lengths if length is not None]
    return max(numbers, default=None) if len(numbers) == len(lengths) else None


def _check_by(findings: Findings, config: Config, held_out: Sequence[RowColumns]) -> None:
    """Check that held-out prompts have the column by which figures are measured."""
    if (by := config.evaluation.by) is None:
        return
    for rows in held_out:
        if by not in rows.names:
            lacks = f"evaluation.by: {rows.where} has no column {by!r} to measure figures by; "
            findings.refuse(lacks + nearest(by, rows.names))


def _list_sources(data: DataConfig | SFTDataConfig, table: Table, dropped: Sequence[int]) -> list[Source]:
    """Return what the run draws from, of the training files without the rows that are dropped."""
    files = table.list_files()
    without = count_by_file(dropped, [len(file) for file in files])
    return make_sources(data.train, [len(file) + file.unread - out for file, out in zip(files, without, strict=True)])


def look_at_demonstrations(
    findings: Findings, config: SFTConfig, limit: TokenLimit, tokenizer: Tokenizer | None
) -> tuple[list[Source], int]:
    """Do as `look_at_prompts` for a supervised run; return what is drawn from, and how many are held out."""
    data, until = config.data, time.monotonic() + READ_SECONDS
    tables = []
    for paths in (data.validation, data.train):  # the largest last: it gets what time the other left
        table = None
        if paths:
            findings.doing(f"Reading {name_files(paths)[0]}")
            with findings.collecting():
                columns = (data.prompt, data.response, data.tools, data.conversation)
                table = open_demonstrations(name_files(paths)[1], *columns, until - time.monotonic())
                _note_unread(findings, table, name_files(paths)[0])
        if table is not None and tokenizer:
            with findings.collecting():
                _look_at_demonstration_lengths(findings, config, table, name_files(paths or ())[0], limit, tokenizer)
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
    """Do as `look_at_prompts` for preferences; return the number of rows, and of those to validate on."""
    until = time.monotonic() + READ_SECONDS
    validation = config.data.validation
    held_out = _look_at_preferences(findings, config, validation, limit, tokenizer, until) if validation else 0
    rows = _look_at_preferences(findings, config, config.data.train, limit, tokenizer, until)
    return rows, held_out


def _look_at_preferences(
    findings: Findings,
    config: PreferenceConfig,
    paths: str | Sequence[str],
    limit: TokenLimit,
    tokenizer: Tokenizer | None,
    until: float,
) -> int:
    rows = 0
    findings.doing(f"Reading {name_files(paths)[0]}")
    with findings.collecting():
        read = PreferenceTable(name_files(paths)[1], preference_columns(config), until - time.monotonic())
        rows = len(read) + read.table.unread
        _note_unread(findings, read.table, name_files(paths)[0])
        problems = RowProblems()
        read.check_figures(problems)
        problems.raise_any()
        _note_alike(findings, read, name_files(paths)[0])
        if tokenizer is not None:
            _look_at_preference_lengths(findings, config, read, name_files(paths)[0], limit, tokenizer)
    return rows


def name_files(train: str | Iterable[str]) -> tuple[str, list[str]]:
    """Return what messages call one file or several, and their paths. Weights by path count as paths."""
    paths = [train] if isinstance(train, str) else list(train)
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more files" if len(paths) > 3 else ""), paths


def validation_files(config: Config) -> list[tuple[str, list[str]]]:
    """Return `name_files` of each file of held-out prompts."""
    return [name_files(path) for path in config.data.validation_files().values()]


def list_columns(shapes: Sequence[Shape], name: str, prompt: str, where: Callable[[int], str]) -> list[RowColumns]:
    """Return the columns of a file's rows but the prompt; `name` stands for rows shaped as the first."""
    groups = []
    for number, shape in enumerate(shapes):
        more = f" and {shape.rows - 1:,} more rows" if shape.rows > 1 else ""
        rows = f"{where(shape.first)}{more}" if number else name
        groups.append(RowColumns(rows, tuple(column for column in shape.columns if column != prompt)))
    return groups


def check_reward_columns(
    function: Callable[..., Any] | None,
    key: str,
    arguments: Mapping[str, Any],
    columns: Sequence[RowColumns],
    gets: Sequence[str],
) -> None:
    """Check that a reward can be called with the columns of each row.

    Args:
        function: the reward; None: only names are checked.
        key: its section of the config.
        arguments: what that gives it.
        columns: of all rows.
        gets: what a reward gets besides.

    Raises:
        ConfigError: naming the rows, and the first column that is missing, too many, or taken by something else.
    """
    accepted = None if function is None else keywords(function)
    for rows in columns:
        for name in gets:
            if name in rows.names and (accepted is None or name in accepted):
                raise ConfigError(
                    f"{rows.where}: a reward gets {name!r} from the run, so it would never see the column {name!r}; "
                    "rename the column in the data"
                )
    for rows in columns or [RowColumns("", ())]:
        passable = [*gets, *rows.names]
        if clash := [name for name in arguments if name in passable]:
            raise ConfigError(
                f"{key}.arguments: a reward already gets {', '.join(map(repr, clash))}, from the run or as a column "
                f"of {rows.where}; name the argument differently"
            )
        if function is not None and columns:
            sources = f"{', '.join(gets)}, the columns of {rows.where} and {key}.arguments (docs/rewards.md)"
            passed = [name for name in passable if accepted is None or name in accepted]
            check_call(function, f"{key}.function", [*passed, *arguments], sources, values=arguments)


def check_rewards(rewards: Sequence[RewardPlan], columns: Sequence[RowColumns], gets: Sequence[str]) -> None:
    """Call `check_reward_columns` for each reward of a run."""
    for reward in rewards:
        check_reward_columns(resolve(reward.function), reward.key, reward.arguments, columns, gets)


def run_own_check(
    function: Callable[..., Any], key: str, arguments: Mapping[str, Any], columns: Sequence[RowColumns] | None
) -> None:
    """Have a reward, or an environment, that has a `check` look at its arguments and at the columns of each row.

    Raises:
        ConfigError: what it says, after `key`.
    """
    if any(isinstance(value, str) and "${" in value for value in arguments.values()):
        return  # it is read where the reward runs
    if isinstance(function, type) and not isinstance(getattr_static(function, "check", None), staticmethod):
        return  # an instance's is its own matter
    check = getattr(function, "check", lambda arguments, columns: None)
    shapes: list[tuple[str, ...] | None] = [rows.names for rows in columns or ()]
    for names in shapes or [None]:
        try:
            check(arguments, names)
        except ConfigError as error:
            error.args = (f"{key}: {error}", *error.args[1:])
            raise


def run_tokenizer_check(
    function: Callable[..., Any], key: str, arguments: Mapping[str, Any], tokenizer: Tokenizer
) -> None:
    """Have an environment that has a `check_tokenizer` look at the model's tokenizer.

    Raises:
        UserError: what it says, after `key`.
    """
    check = getattr_static(function, "check_tokenizer", None)
    if not isinstance(check, staticmethod):
        return
    if (loaded := tokenizer()) is not None:
        try:
            check(arguments, loaded)
        except UserError as error:
            error.args = (f"{key}: {error}", *error.args[1:])
            raise


def _open(
    findings: Findings, paths: Sequence[str], needed: Sequence[str], until: float, names: ColumnNames
) -> Table | None:
    findings.doing(f"Reading {name_files(paths)[0]}")
    with findings.collecting():
        table = open_table(paths, list(dict.fromkeys(needed)), until - time.monotonic())
        names.check(table)
        _note_unread(findings, table, name_files(paths)[0])
        return table
    return None


def _note_unread(findings: Findings, table: Table, name: str) -> None:
    if table.unread:
        findings.note(
            f"{len(table):,} of {len(table) + table.unread:,} rows of {name} were read; the run reads all of them "
            "before anything starts"
        )


def _look_at_prompt_lengths(
    findings: Findings, config: Config, table: Table, name: str, limit: TokenLimit, tokenizer: Tokenizer
) -> tuple[list[int], bool, int | None]:
    """Check prompts that may be too long.

    Returns:
        Which are to be dropped; whether some were not looked at; and how many tokens the longest of the others has at
        most, None where some were not looked at.
    """
    data = config.data
    prompts, tools = table.needed[data.prompt], table.needed[data.tools] if data.tools else None
    unsurely = _needs_template(data) or tokenizer.has_more
    unsure = [row for row, prompt in enumerate(prompts) if unsurely or not is_surely_short(prompt, limit.tokens)]
    firsts, before = _find_first_rows(findings, table, tokenizer)
    short = max((bound_tokens(prompts[row]) for row in set(range(len(prompts))).difference(unsure)), default=0)
    if not (unsure or before) or (loaded := tokenizer()) is None:
        return [], False, None if unsure or table.unread else short
    renderer = Renderer(loaded, data.chat_template, data.system)
    problems = RowProblems()

    def tokens(rows: Sequence[int]) -> list[int]:
        _, ids = renderer.render_prompts(
            [prompts[row] for row in rows],
            lambda row: table.where(rows[row]),
            problems=problems,
            tools=None if tools is None else [tools[row] for row in rows],
        )
        for row, prompt_ids in zip(rows, ids, strict=True):
            tokenizer.check(prompt_ids, table.where(row), problems)
            if row in firsts and len(prompt_ids):
                _show(findings, loaded, table.where(row), _Looked(prompt_ids))
        return [len(prompt_ids) for prompt_ids in ids]

    def size(row: int) -> float:
        return _count_characters(prompts[row])

    rows, lengths = _measure_lengths(findings, name, "prompts", len(prompts), unsure, before, size, tokens)
    problems.raise_any()
    if data.overlong_prompts == "error":
        check_length(lengths, limit, "the prompt", lambda row: table.where(rows[row]))
    dropped = [row for row, length in zip(rows, lengths, strict=True) if length > limit.tokens]
    if len(dropped) == len(prompts) and not table.unread:
        raise make_length_error(len(dropped), min(lengths), limit)
    partly = not set(unsure).issubset(rows) or table.unread > 0
    return dropped, partly, None if partly else max(short, *(length for length in lengths if length <= limit.tokens), 0)


def _look_at_demonstration_lengths(
    findings: Findings, config: SFTConfig, table: Table, name: str, limit: TokenLimit, tokenizer: Tokenizer
) -> None:
    data = config.data
    prompts, responses = table.needed[data.prompt], table.needed[data.response]
    called = table.needed[data.tools] if data.tools else None

    unsurely = _needs_template(data) or tokenizer.has_more

    def is_short(row: int) -> bool:
        prompt, response = prompts[row], responses[row]
        return (
            not unsurely
            and isinstance(response, str)
            and is_surely_short(prompt, limit.tokens - len(response.encode()))
        )

    _note_empty(findings, table, data.response, name)
    unsure = [row for row in range(len(table)) if not is_short(row)]
    firsts, before = _find_first_rows(findings, table, tokenizer)
    if not (unsure or before) or (loaded := tokenizer()) is None:
        return
    renderer = Renderer(loaded, data.chat_template, data.system)
    problems = RowProblems()

    def tokens(rows: Sequence[int]) -> list[int]:
        def where(row: int) -> str:
            return table.where(rows[row])

        asked, tools = [prompts[row] for row in rows], None if called is None else [called[row] for row in rows]
        rendered = renderer.render_prompts(asked, where, problems=problems, tools=tools)
        answers = [responses[row] for row in rows]
        tokenized = renderer.render_completions(asked, rendered, answers, data.response, where, problems, tools)
        for row, ids, learned in zip(rows, *join(rendered[1], tokenized), strict=True):
            tokenizer.check(ids, table.where(row), problems)
            if row in firsts and learned.any():
                _show(findings, loaded, table.where(row), _Looked(ids, learned))
        return [len(prompt) + len(response.ids) for prompt, response in zip(rendered[1], tokenized, strict=True)]

    def size(row: int) -> float:
        return _count_characters(prompts[row]) + (_count_characters(responses[row]) if responses[row] else 0)

    rows, lengths = _measure_lengths(findings, name, "demonstrations", len(table), unsure, before, size, tokens)
    problems.raise_any()
    _note_merged(findings, name, renderer, len(rows))
    check_length(lengths, limit, "prompt and response together", lambda row: table.where(rows[row]))


def _look_at_preference_lengths(
    findings: Findings,
    config: PreferenceConfig,
    read: PreferenceTable,
    name: str,
    limit: TokenLimit,
    tokenizer: Tokenizer,
) -> None:
    unsurely = _needs_template(config.data) or tokenizer.has_more

    def is_short(row: int) -> bool:
        texts = read.texts(row)
        plain = not unsurely and read.has_prompts and all(isinstance(text, str) for text in texts)
        return plain and is_surely_short(texts[0], limit.tokens - max(len(text.encode()) for text in texts[1:]))

    unsure = [row for row in range(len(read)) if not is_short(row)]
    firsts, before = _find_first_rows(findings, read.table, tokenizer)
    if not (unsure or before) or (loaded := tokenizer()) is None:
        return
    renderer = Renderer(loaded, config.data.chat_template, config.data.system)
    problems = RowProblems()

    def tokens(rows: Sequence[int]) -> list[int]:
        prompts, responses = read.tokenize(renderer, rows, problems)
        for number, row in enumerate(rows):
            both = join([prompts[number]] * len(responses), [of_column[number] for of_column in responses])
            for ids, learned in zip(*both, strict=True):
                tokenizer.check(ids, read.table.where(row), problems)
                if row in firsts and learned.any():
                    _show(findings, loaded, read.table.where(row), _Looked(ids, learned))
        longest = [max(len(response.ids) for response in of_row) for of_row in zip(*responses, strict=True)]
        return [len(prompt) + most for prompt, most in zip(prompts, longest, strict=True)]

    def size(row: int) -> float:
        return sum(map(_count_characters, read.texts(row)))

    rows, lengths = _measure_lengths(findings, name, "preferences", len(read), unsure, before, size, tokens)
    problems.raise_any()
    _note_merged(findings, name, renderer, len(rows))
    check_length(lengths, limit, "prompt and response together", lambda row: read.table.where(rows[row]))


def _note_alike(findings: Findings, read: PreferenceTable, name: str) -> None:
    """Note pairs of which both responses are the same: they teach nothing."""
    if len(read.columns.responses) < 2:
        return
    columns = [read.table.needed[column] for column in read.columns.responses]
    alike = [row for row, (first, other) in enumerate(zip(*columns, strict=True)) if first == other]
    if alike:
        findings.note(
            f"{name}: of {len(alike):,} of {len(read):,} pairs that were read, both responses are the same: they teach "
            f"nothing (the first is {read.table.where(alike[0])})"
        )


def _note_empty(findings: Findings, table: Table, column: str, name: str) -> None:
    """Note rows whose response is empty: of them the end alone is learned."""
    empty = [row for row, response in enumerate(table.needed[column]) if _is_empty(response)]
    if empty:
        findings.note(
            f"{name}: of {len(empty):,} of {len(table):,} rows that were read, the response is empty: they teach the "
            f"model to end at once (the first is {table.where(empty[0])})"
        )


def _is_empty(response: Any) -> bool:
    if not isinstance(response, list):
        return response == ""
    turns = [message for message in response if isinstance(message, dict)]
    return bool(turns) and not any(turn.get("content") or turn.get("tool_calls") for turn in turns)


def _needs_template(data: DataConfig | SFTDataConfig | PreferenceDataConfig) -> bool:
    """Return whether more than its text decides what a plain prompt becomes, or whether it is refused."""
    return bool(data.chat_template or data.system is not None or data.tools or data.template_arguments)


def _note_merged(findings: Findings, name: str, renderer: Renderer, rows: int) -> None:
    if renderer.merged:
        findings.note(
            f"{name}: in {renderer.merged:,} responses of the {rows:,} rows that were tokenized, the end of the prompt "
            "and the beginning of the response are one token. Learned are the tokens that the response has behind the "
            "prompt's own, as the model is asked the prompt"
        )


def _measure_lengths(
    findings: Findings,
    name: str,
    noun: str,
    number: int,
    unsure: list[int],
    before: list[int],
    size: Callable[[int], float],
    tokens: Callable[[Sequence[int]], list[int]],
) -> tuple[list[int], list[int]]:
    """Measure as many rows of `unsure` as there is time for; return the rows in their order, and their lengths.

    The rows of `before` come first, by which lengths are told; then what is likeliest to be wrong: rows of an odd type,
    and the longest.
    """
    findings.doing(f"Looking at the {noun} of {name}")
    unsure_rows = sorted(set(unsure).difference(before), key=size, reverse=True)
    lengths: dict[int, int] = {}
    until = time.monotonic() + LENGTHS_SECONDS
    later = [unsure_rows[at : at + _ROWS_AT_ONCE] for at in range(0, len(unsure_rows), _ROWS_AT_ONCE)]
    for rows in [before, *later] if before else later:
        lengths.update(zip(rows, tokens(rows), strict=True))
        if time.monotonic() > until:
            break
    looked = number - len(set(unsure).difference(lengths))
    if looked < number:
        findings.note(
            f"lengths of {looked:,} of {number:,} {noun} of {name} were looked at, those of the longest texts among "
            "them; the run looks at all before anything starts"
        )
    sample = [*lengths.values()] if len(lengths) == number else [lengths[row] for row in before]
    if sample:
        half, most, longest = np.percentile(sample, (50, 95, 100), method="nearest").tolist()
        which = f"{number:,}" if len(sample) == number else f"{len(sample):,} of {number:,}"
        findings.seen.append(
            (
                "lengths",
                f"of {which} {noun} of {name}: median {half:,} tokens, 95 % to {most:,}, longest {longest:,}",
            )
        )
    ordered = sorted(lengths)
    return ordered, [lengths[row] for row in ordered]


def _count_characters(prompt: Any) -> float:
    """Return the characters of a prompt; a prompt that a run would refuse is larger than all."""
    if isinstance(prompt, str) and prompt.strip():
        return len(prompt)
    messages = prompt if isinstance(prompt, list) else []
    contents = [message.get("content") if isinstance(message, dict) else None for message in messages]
    strings = [content for content in contents if isinstance(content, str)]
    if not strings or len(strings) < len(contents) or prompt[-1].get("role") == "assistant":
        return math.inf
    return sum(map(len, strings))


def _hash_prompts(prompts: Sequence[Any]) -> set[int]:
    """Return hashes of the prompts: it takes a second for each 100,000 long chats, and no copy of them."""
    return {hash(prompt if isinstance(prompt, str) else repr(prompt)) for prompt in prompts}


def _note_repeated(
    findings: Findings, train: str, prompts: Sequence[Any], held_out: Sequence[tuple[str, Sequence[Any]]]
) -> None:
    """Note that training prompts repeat each other, or that held-out prompts are trained on."""
    trained = _hash_prompts(prompts)
    if len(prompts) - len(trained) >= REPEATED * len(prompts):
        findings.note(
            f"of the {len(prompts):,} prompts of {train} only {len(trained):,} differ; the others repeat them"
        )
    for name, others in held_out:
        distinct = _hash_prompts(others)
        shared = len(distinct & trained)
        if shared and shared >= SHARED * len(distinct):
            which = "all" if shared == len(distinct) else f"{shared:,} of {len(distinct):,}"
            findings.note(
                f"{which} validation prompts of {name} are in {train} too: validation then measures what was trained on"
            )
