"""Prompts: those that a run trains on, and those that are held out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from enginehouse.engines.model import positions, served_positions
from enginehouse.errors import nearest
from enginehouse_rl.config.counting import count
from enginehouse_rl.config.schema import Config
from enginehouse_rl.data.rendering import TokenLimit
from enginehouse_rl.plan.parts.data import DataPart, describe_sources, key_paths
from enginehouse_rl.plan.parts.draft import Fact
from enginehouse_rl.plan.parts.model import ModelPart
from enginehouse_rl.plan.parts.playing import EnvironmentPart
from enginehouse_rl.plan.parts.steps import samples_per_step
from enginehouse_rl.plan.rewards import is_reserved
from enginehouse_rl.plan.rows import RowReading, look_at_held_out, look_at_prompts


class PromptsPart(DataPart[Config]):
    """The prompts of a run, those that it is validated on among them.

    Attributes:
        rows: what is known of them.
    """

    rows: RowReading

    def settle(self) -> None:
        self.limit = self.prompt_limit()
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
        samples = samples_per_step(self.config)
        return -(-samples // self.config.algorithm.minibatches) if self.run.roles[role].trained else samples

    def longest(self) -> tuple[int, str]:
        return self.with_response("rollout.sampling.max_tokens", self.config.rollout.sampling.max_tokens)

    def with_response(self, key: str, new: int) -> tuple[int, str]:
        """Return the tokens of the longest prompt with a response, and what they are.

        Args:
            key: the config key that says how long a response may be.
            new: its value.
        """
        prompt, words = self.limit.tokens, f"a prompt of {self.limit.option}"
        # Where there are more turns, a response to the prompt is not all of a row.
        if self.rows.longest is not None and self.run[EnvironmentPart].is_single_turn:
            prompt, words = self.rows.longest, f"the longest prompt of the data, {self.rows.longest:,}"
        return prompt + new, f"{words}, and {key}={new}"

    def answered(self) -> str:
        """Return which held-out prompts are answered, and how."""
        files = ", ".join(f"{number:,} of {path}" for path, number in self.rows.held_out)
        each, temperature = self.config.evaluation.samples_per_prompt, self.config.evaluation.sampling.temperature
        how = f"{count(each, 'sample')} each at temperature {temperature:g}" if temperature else "greedily"
        return f"{files}, answered {how}: {self.answers():,} answers"

    def answers(self) -> int:
        """Return how many responses to held-out prompts there are."""
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
            yield "validation", f"prompts: {self.answered()} before the first step{often} and after the last"

    def prompt_limit(self) -> TokenLimit:
        """Check that a response fits into the model and each engine that generates, where limits are known.

        Returns:
            How long prompts may be: as the config says, or what a response leaves.
        """
        config, roles, model = self.config, self.run.roles, self.run[ModelPart].json
        prompt = config.data.max_prompt_tokens
        limit_by_config = TokenLimit.of("data.max_prompt_tokens", prompt)
        shortest = replace(limit_by_config, cure=f"{limit_by_config.cure}; data.overlong_prompts=drop leaves them out")
        key, wanted = "rollout.sampling.max_tokens", config.rollout.sampling.max_tokens
        answers = [(key, wanted, "rollout")]
        if config.data.validation_files():
            if config.evaluation.sampling.max_tokens:
                key, wanted = "evaluation.sampling.max_tokens", config.evaluation.sampling.max_tokens
            answers.append((key, wanted, "evaluation" if "evaluation" in roles else "rollout"))
        served, served_name = served_positions(model), "the model's positions (max_position_embeddings)"
        rescaled = served != positions(model)
        if rescaled:
            served_name = (
                "the rows that all engines compute alike by the model's RoPE (longer ones have other frequencies)"
            )
        for key, wanted, role in dict.fromkeys(answers):
            option = roles[role].options.get("max_model_tokens")
            if served is not None and rescaled and option is not None and option > served:
                self.refuse(
                    f"{role}.engine.options.max_model_tokens is {option}, and beyond {served} tokens the model's RoPE "
                    f"has other frequencies, which training and {role} would choose in different ways: at most {served}"
                )
            limits = {served_name: served, f"{role}.engine.options.max_model_tokens": option}
            known = [(limit, name) for name, limit in limits.items() if isinstance(limit, int)]
            limit, name = min(known, default=(prompt + wanted, ""))
            if wanted >= limit:
                self.refuse(f"{key} is {wanted}, which with a prompt before it is more than {name}, {limit}")
            elif limit - wanted < shortest.tokens:
                shortest = TokenLimit(
                    limit - wanted,
                    f"the {limit - wanted} that leave room for {wanted} new ones ({key}) within {name}, {limit}",
                    f"drop such rows (data.overlong_prompts=drop leaves them out) or lower {key}",
                )
        return shortest

    def _check_positions(self) -> None:
        """Check that the longest sample fits into the models beside the actor's."""
        longest = self.limit.tokens + self.config.rollout.sampling.max_tokens
        for name, model in self.run.models.items():
            needed = longest + (name == "reward_model")  # it reads a token more: `append_end`
            if name in self.run.roles and (limit := positions(model)) is not None and limit < needed:
                self.refuse(
                    f"{name}.path: the model has {limit} positions (max_position_embeddings), and a sample may need "
                    f"{needed}: lower data.max_prompt_tokens or rollout.sampling.max_tokens"
                )

    def _check_save_best(self) -> None:
        """Check that validations measure what the best model is known by, as far as it is no figure of a reward's."""
        config = self.config
        metric, files = config.train.save_best, config.data.validation_files()
        if metric is None:
            return
        if not files:
            self.refuse("train.save_best is set, but there is no file to validate on (data.validation)")
            return
        if not config.train.validate_every:
            self.note("train.save_best is set, and train.validate_every is 0: the last step's model is the best")
        each = config.evaluation.samples_per_prompt
        names = ["reward"]
        if each > 1:
            passes = sorted({each, *(1 << power for power in range(each.bit_length()))})
            names += [f"mean@{each}", *(f"pass@{k}" for k in passes), f"majority@{each}"]
        places = [f"validation/{name}".rstrip("/") for name in files]
        known = [f"{place}/{name}" for place in places for name in names]
        place, _, name = metric.rpartition("/")
        if place not in places and (config.evaluation.by is None or place.rpartition("/")[0] not in places):
            self.refuse(f"train.save_best is {metric!r}, and no validation measures that; {nearest(metric, known)}")
        elif name not in names and (is_reserved(name) or difflib.get_close_matches(name, names, n=1, cutoff=0.8)):
            known = [f"{place}/{name}" for name in names]
            self.refuse(f"train.save_best is {metric!r}: {nearest(metric, known)}, or a figure of the reward")


class HeldOutPart(PromptsPart):
    """The prompts of an evaluation without a run: those that are held out."""

    def settle(self) -> None:
        self.limit = self.prompt_limit()
        if not self.config.data.validation_files():
            self.refuse(
                "there are no held-out prompts to evaluate on (data.validation): name a file, as in "
                "data.validation=held_out.jsonl, or several by name, data.validation='{aime: a.jsonl, gsm: b.jsonl}'"
            )
        self.rows = look_at_held_out(self.findings, self.config, self.limit, self.run[ModelPart].tokenizer)
        self.columns = self.rows.columns

    def rows_of(self, role: str) -> int:
        return self.answers()

    def longest(self) -> tuple[int, str]:
        sampling = self.config.evaluation.sampling.beside(self.config.rollout.sampling)
        return self.with_response("evaluation.sampling.max_tokens", sampling.max_tokens)

    def facts(self) -> Iterable[Fact]:
        yield "prompts", self.answered()
