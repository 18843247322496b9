"""Checks the training prompts and the held-out prompts of a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from enginehouse.engines.model import positions, served_positions
from enginehouse.errors import nearest
from enginehouse_rl.benchmarks.names import list_benchmarks
from enginehouse_rl.config.counting import count
from enginehouse_rl.config.schema import Config
from enginehouse_rl.data.rendering import TokenLimit
from enginehouse_rl.plan.parts.benchmarks import BenchmarksPart
from enginehouse_rl.plan.parts.data import DataPart, describe_sources, key_paths
from enginehouse_rl.plan.parts.draft import Fact
from enginehouse_rl.plan.parts.model import ModelPart
from enginehouse_rl.plan.parts.playing import EnvironmentPart
from enginehouse_rl.plan.parts.steps import count_samples
from enginehouse_rl.plan.rewards import is_reserved
from enginehouse_rl.plan.rows import RowReading, look_at_held_out, look_at_prompts


class PromptsPart(DataPart[Config]):
    """The training prompts and the validation prompts of a run."""

    rows: RowReading

    @property
    def is_validated(self) -> bool:
        return self.config.is_validated

    def settle(self) -> None:
        self.limit = self._limit_prompts()
        self._check_positions()
        self.rows = look_at_prompts(self.findings, self.config, self.limit, self.run[ModelPart].tokenizer)
        self.columns = self.rows.columns
        self.check_validated()
        self._check_save_best()

    def files(self) -> Mapping[str, str]:
        files = self.config.data.validation_files()
        held_out = {f"data.validation.{name}".rstrip("."): path for name, path in files.items()}
        return key_paths("data.train", self.config.data.train) | held_out

    def rows_of(self, role: str) -> int:
        samples = count_samples(self.config)
        return -(-samples // self.config.algorithm.minibatches) if self.run.roles[role].trained else samples

    def find_longest(self) -> tuple[int, str]:
        return self.add_response("rollout.sampling.max_tokens", self.config.rollout.sampling.max_tokens)

    def find_longest_answered(self) -> int:
        return self.run[BenchmarksPart].longest

    def add_response(self, key: str, tokens: int) -> tuple[int, str]:
        """Return the length of the longest prompt with a response of `tokens`, and a description of the two parts.
        `tokens` is the value of `key`."""
        prompt, description = self.limit.tokens, f"a prompt of {self.limit.option}"
        # In an environment of several turns, a row is more than a prompt and a response.
        if self.rows.longest is not None and self.run[EnvironmentPart].is_single_turn:
            prompt, description = self.rows.longest, f"the longest prompt of the data, {self.rows.longest:,}"
        return prompt + tokens, f"{description}, and {key}={tokens}"

    def describe_answers(self) -> str:
        """Describe which held-out prompts the model answers, and how."""
        files = ", ".join(f"{number:,} of {path}" for path, number in self.rows.held_out)
        samples, temperature = self.config.evaluation.samples_per_prompt, self.config.evaluation.sampling.temperature
        how = f"{count(samples, 'sample')} each at temperature {temperature:g}" if temperature else "greedily"
        return f"{files}, answered {how}: {self.count_answers():,} answers"

    def count_answers(self) -> int:
        """Return the number of responses to held-out prompts."""
        return self.config.evaluation.samples_per_prompt * sum(number for _, number in self.rows.held_out)

    def facts(self) -> Iterable[Fact]:
        data, train = self.config.data, self.config.train
        words = describe_sources(self.rows.sources, "prompts", data.train, train.steps * train.prompts_per_step)
        words += f"; by {data.order_by}, the lowest first" if data.order_by else ""
        if self.rows.dropped:
            at_least = "at least " if self.rows.sampled else ""
            words += f"; {at_least}{self.rows.dropped:,} more are too long and left out"
        yield "data", words
        if self.rows.held_out:
            often = f", every {count(train.validate_every, 'step')}" if train.validate_every else ""
            yield "validation", f"prompts: {self.describe_answers()} before the first step{often} and after the last"

    def _limit_prompts(self) -> TokenLimit:
        """Return the maximum length of a prompt, set by the config or by the room that a response leaves. A config is
        rejected if its longest response does not fit into the model, or into an engine that generates."""
        config, roles, model = self.config, self.run.roles, self.run[ModelPart].json
        prompt = config.data.max_prompt_tokens
        limit_by_config = TokenLimit.from_option("data.max_prompt_tokens", prompt)
        shortest = replace(limit_by_config, cure=f"{limit_by_config.cure}; data.overlong_prompts=drop leaves them out")
        key, tokens = "rollout.sampling.max_tokens", config.rollout.sampling.max_tokens
        responses = [(key, tokens, "rollout")]
        if config.data.validation_files():
            if config.evaluation.sampling.max_tokens:
                key, tokens = "evaluation.sampling.max_tokens", config.evaluation.sampling.max_tokens
            responses.append((key, tokens, "evaluation" if "evaluation" in roles else "rollout"))
        served, served_name = served_positions(model), "the model's positions (max_position_embeddings)"
        rescaled = served != positions(model)
        if rescaled:
            served_name = (
                "the longest rows for which all engines compute the model's RoPE alike (longer ones have other "
                "frequencies)"
            )
        for key, tokens, role in dict.fromkeys(responses):
            option = roles[role].options.get("max_model_tokens")
            if served is not None and rescaled and option is not None and option > served:
                self.refuse(
                    f"{role}.engine.options.max_model_tokens must be at most {served}, not {option}: for longer rows "
                    f"the model's RoPE has other frequencies, which training and {role} would choose differently"
                )
            limits = {served_name: served, f"{role}.engine.options.max_model_tokens": option}
            known = [(limit, name) for name, limit in limits.items() if isinstance(limit, int)]
            limit, name = min(known, default=(prompt + tokens, ""))
            if tokens >= limit:
                together = f"a prompt and its response may have at most {limit:,} tokens together"
                self.refuse(f"{key} is {tokens:,}, but {together}: {name}")
            elif limit - tokens < shortest.tokens:
                shortest = TokenLimit(
                    limit - tokens,
                    f"the {limit - tokens} that leave room for {tokens} new tokens ({key}) within {name}, {limit}",
                    f"drop such rows (data.overlong_prompts=drop leaves them out) or lower {key}",
                )
        return shortest

    def _check_positions(self) -> None:
        """Check that the longest sample fits into the models of all roles except the actor."""
        longest = self.limit.tokens + self.config.rollout.sampling.max_tokens
        for name, model in self.run.models.items():
            needed = longest + (name == "reward_model")  # a reward model reads one token more: `append_end`
            if name in self.run.roles and (limit := positions(model)) is not None and limit < needed:
                self.refuse(
                    f"{name}.path: the model has {limit} positions (max_position_embeddings), but a sample may need "
                    f"{needed}: lower data.max_prompt_tokens or rollout.sampling.max_tokens"
                )

    def _check_save_best(self) -> None:
        """Check that validations measure the metric of `train.save_best`, unless a reward may report that metric."""
        config = self.config
        metric, files = config.train.save_best, config.data.validation_files()
        benchmarks = [benchmark.name for benchmark in list_benchmarks(config.evaluation.benchmarks)]
        if metric is None:
            return
        if not config.is_validated:
            self.refuse("train.save_best is set, but there is no file to validate on (data.validation)")
            return
        if not config.train.validate_every:
            self.note("train.save_best is set, but train.validate_every is 0: the model of the last step is the best")
        samples = config.evaluation.samples_per_prompt
        names = ["reward"]
        if samples > 1:
            passes = sorted({samples, *(1 << power for power in range(samples.bit_length()))})
            names += [f"mean@{samples}", *(f"pass@{k}" for k in passes), f"majority@{samples}"]
        places = [f"validation/{name}".rstrip("/") for name in (*files, *benchmarks)]
        metric_names = [f"{place}/{name}" for place in places for name in names]
        place, _, name = metric.rpartition("/")
        if place not in places and (config.evaluation.by is None or place.rpartition("/")[0] not in places):
            self.refuse(f"train.save_best: no validation measures {metric!r}. {nearest(metric, metric_names)}")
        elif name not in names and (is_reserved(name) or difflib.get_close_matches(name, names, n=1, cutoff=0.8)):
            metric_names = [f"{place}/{name}" for name in names]
            choices = f"{nearest(metric, metric_names)}, or a metric of the reward"
            self.refuse(f"train.save_best: no validation measures {metric!r}. {choices}")


class HeldOutPart(PromptsPart):
    """The held-out prompts of an evaluation outside a run."""

    @property
    def needs_reward(self) -> bool:
        return bool(self.config.data.validation_files())

    def settle(self) -> None:
        if not self.config.data.validation_files() and self.config.evaluation.benchmarks:
            self.limit = TokenLimit.from_option("data.max_prompt_tokens", self.config.data.max_prompt_tokens)
            self.rows, self.columns = RowReading(), ()
            return
        self.limit = self._limit_prompts()
        if not self.config.data.validation_files():
            self.refuse(
                "there are no held-out prompts to evaluate on (data.validation): name a file, as in "
                "data.validation=held_out.jsonl, or several by name, data.validation='{aime: a.jsonl, gsm: b.jsonl}'; "
                "or a benchmark, --benchmark gsm8k"
            )
        self.rows = look_at_held_out(self.findings, self.config, self.limit, self.run[ModelPart].tokenizer)
        self.columns = self.rows.columns

    def rows_of(self, role: str) -> int:
        return self.count_answers() + self.run[BenchmarksPart].count_answers()

    def find_longest(self) -> tuple[int, str]:
        if not self.rows.held_out:
            return self.find_longest_answered(), "the longest prompt of a benchmark, with its response"
        sampling = self.config.evaluation.sampling.complete(self.config.rollout.sampling)
        return self.add_response("evaluation.sampling.max_tokens", sampling.max_tokens)

    def facts(self) -> Iterable[Fact]:
        if self.rows.held_out:
            yield "prompts", self.describe_answers()
