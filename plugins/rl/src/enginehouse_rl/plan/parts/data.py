"""Checks the rows of a run's files, and the maximum length of a row. `prompts` does this for runs that generate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from enginehouse.engines.model import positions
from enginehouse_rl.config.counting import count
from enginehouse_rl.config.schema import DPOConfig, PreferenceConfig, RMConfig, SFTConfig
from enginehouse_rl.data.rendering import TokenLimit
from enginehouse_rl.data.sources import Source
from enginehouse_rl.plan.parts.draft import C, Fact, Part
from enginehouse_rl.plan.parts.model import ModelPart
from enginehouse_rl.plan.reward_columns import RowColumns
from enginehouse_rl.plan.rows import look_at_demonstrations, look_at_preferences, name_files


class DataPart(Part[C]):
    """The rows of a config's files.

    Attributes:
        limit: the maximum number of tokens of a prompt or, in a run that does not generate, of a row.
        columns: the columns that rewards get; None if unknown.
    """

    limit: TokenLimit
    columns: Sequence[RowColumns] | None = None

    def files(self) -> Mapping[str, str]:
        """Return the paths that the run reads, by their config keys."""
        data = self.config.data
        return {**key_paths("data.train", data.train), **key_paths("data.validation", data.validation or [])}

    def rows_of(self, role: str) -> int:
        """Return the maximum number of rows in one call of a role."""
        raise NotImplementedError

    def find_longest(self) -> tuple[int, str]:
        """Return the number of tokens of the longest row, and a description if some of these tokens are generated."""
        return self.limit.tokens, ""

    def find_longest_answered(self) -> int:
        """Return the number of tokens of the longest row that is generated but not trained on; 0 if there is none."""
        return 0

    @property
    def needs_reward(self) -> bool:
        """True if the config's reward scores responses to some of the rows."""
        return True

    @property
    def is_validated(self) -> bool:
        return bool(self.config.data.validation)

    def check_validated(self) -> None:
        """Note validations without a file. This is no error, because users turn validation off by removing the file."""
        if self.config.train.validate_every and not self.is_validated:
            self.note(
                "train.validate_every is set, but there is no file to validate on (data.validation), so there are no "
                "validations"
            )


class DemonstrationsPart(DataPart[SFTConfig]):
    """Prompts with their responses."""

    sources: Sequence[Source]
    held_out: int

    def settle(self) -> None:
        model = self.run[ModelPart]
        self.limit = row_limit(self.config, model)
        self.sources, self.held_out = look_at_demonstrations(self.findings, self.config, self.limit, model.tokenizer)
        self.check_validated()

    def rows_of(self, role: str) -> int:
        return self.config.train.rows_per_step

    def facts(self) -> Iterable[Fact]:
        train, data = self.config.train, self.config.data
        yield "data", describe_sources(self.sources, "demonstrations", data.train, train.steps * train.rows_per_step)
        yield from list_held_out(self.config, self.held_out, "demonstrations")
        yield "a step", f"{train.rows_per_step} rows, at most {train.rows_per_step * data.max_tokens:,} tokens"
        yield "the run", f"{train.steps} steps, an optimizer step each"


class PreferencesPart(DataPart[PreferenceConfig]):
    """Pairs of responses, one of which is preferred, or single responses with a rating."""

    rows: int
    held_out: int

    @property
    def is_rated(self) -> bool:
        """True if a row has one response with its rating."""
        config = self.config
        return isinstance(config, DPOConfig) and config.algorithm.loss == "kto"

    def settle(self) -> None:
        config, model = self.config, self.run[ModelPart]
        # A score needs one more token (`enginehouse.roles.sequence_scores`).
        self.limit = row_limit(config, model, further=int(isinstance(config, RMConfig)))
        self.rows, self.held_out = look_at_preferences(self.findings, config, self.limit, model.tokenizer)
        self.check_validated()
        if self.is_rated and self.held_out == 1:
            self.refuse("data.validation must have at least 2 rows, not 1: kto compares the responses of several rows")

    def rows_of(self, role: str) -> int:
        return 2 * self.config.train.rows_per_step

    def facts(self) -> Iterable[Fact]:
        train, data = self.config.train, self.config.data
        noun, responses = ("rated responses", 1) if self.is_rated else ("pairs", 2)
        yield "data", describe_rows(self.rows, noun, data.train, train.steps * train.rows_per_step)
        longest = train.rows_per_step * responses * data.max_tokens
        yield (
            "a step",
            f"{train.rows_per_step} {noun}, at most {longest:,} tokens, computed twice to find the gradient",
        )
        yield from list_held_out(self.config, self.held_out, noun)
        yield "the run", f"{train.steps} steps, an optimizer step each"


class PreferenceLossPart(Part[PreferenceConfig]):
    """The loss of a run on preferences."""

    def settle(self) -> None:
        """Reject arguments that the loss does not use."""
        config = self.config
        if not isinstance(config, DPOConfig):
            return
        algorithm = config.algorithm
        for name, loss in (("label_smoothing", "sigmoid"), ("desirable_weight", "kto"), ("undesirable_weight", "kto")):
            value, unset = getattr(algorithm, name), type(algorithm).model_fields[name].default
            if value != unset and algorithm.loss != loss:
                self.refuse(f"algorithm.{name} is {value:g}: only algorithm.loss={loss} takes it, not {algorithm.loss}")
        if algorithm.loss == "kto" and config.train.rows_per_step < 2:
            self.refuse("train.rows_per_step must be at least 2, not 1: kto compares the responses of a step")

    def facts(self) -> Iterable[Fact]:
        config = self.config
        if isinstance(config, DPOConfig):
            yield "algorithm", f"{config.algorithm.loss} loss, beta {config.algorithm.beta:g}"
        else:
            yield "algorithm", "a reward model, by the Bradley-Terry loss"


def row_limit(config: SFTConfig | PreferenceConfig, model: ModelPart, further: int = 0) -> TokenLimit:
    """Return the maximum length of a row, from the config or from the model's positions.

    `further` is the number of tokens that the run adds to each row.
    """
    number = positions(model.json)
    if number is not None and number - further < config.data.max_tokens:
        limit = f"the model's positions (max_position_embeddings), {number}"
        if further:
            limit = f"the {number - further} that leave room for a score in {limit}"
        return TokenLimit(number - further, limit, "drop such rows, or shorten them")
    return TokenLimit.from_option("data.max_tokens", config.data.max_tokens)


def key_paths(key: str, paths: str | Iterable[str]) -> dict[str, str]:
    listed = name_files(paths)[1]
    return {key if len(listed) == 1 else f"{key}[{number}]": path for number, path in enumerate(listed)}


def describe_rows(rows: int, noun: str, files: str | Iterable[str], drawn: int) -> str:
    """Describe how many rows some files have, and how often the run uses each row. `drawn` is the total number of rows
    that the run uses, with repetitions."""
    return f"{rows:,} {noun} in {name_files(files)[0]}, each used {drawn / rows:.2g} times"


def describe_sources(sources: Sequence[Source], noun: str, files: str | Iterable[str], drawn: int) -> str:
    """Describe how often the run uses each source. `drawn` has the same meaning as in `describe_rows`."""
    if len(sources) == 1:
        return describe_rows(sources[0].rows, noun, files, drawn)
    weights = sum(source.weight for source in sources)
    return ", ".join(
        f"{source.weight / weights:.3g} of {source.path} ({source.rows:,} {noun}, "
        f"{drawn * source.weight / weights / source.rows:.2g} epochs)"
        for source in sources
    )


def list_held_out(config: SFTConfig | PreferenceConfig, number: int, noun: str) -> Iterable[Fact]:
    """Yield one fact: the number of held-out rows, and when the model is validated. Yield none without such rows."""
    if config.data.validation:
        every = config.train.validate_every
        often = f"every {count(every, 'step')} and " if every else ""
        yield "validation", f"{number:,} {noun}, {often}after the last step"
