"""Measures the responses to held-out prompts. Responses are greedy unless `evaluation.sampling` sets a temperature.

`enginehouse_rl/metrics.md` describes each metric.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from enginehouse.data import Batch
from enginehouse.errors import DataError, listed
from enginehouse_rl.benchmarks.ratios import join_ratios
from enginehouse_rl.data.files import describe_kind
from enginehouse_rl.episodes.episode_rows import EpisodeRows
from enginehouse_rl.episodes.samples import decode_texts, measure_rewards, sample_rows
from enginehouse_rl.episodes.sampling import make_sampling_params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from enginehouse.engines.rollout import SamplingParams
    from enginehouse_rl.config.schema import Config
    from enginehouse_rl.data.prompts import PromptDataset
    from enginehouse_rl.data.rendering import Counted
    from enginehouse_rl.plan.benchmarks import BenchmarkPlan
    from enginehouse_rl.plan.plan import PlayPlan

log = logging.getLogger(__name__)

MOST_VALUES = 50
"""Maximum number of distinct values in the column `evaluation.by`, because each value gets separate metrics."""


@dataclass(frozen=True)
class Validation:
    """The held-out prompts of a run, how they are answered, and how the responses are measured.

    Attributes:
        prompts: Prompts of all files, one file after another, with the columns of `PromptDataset.rows`.
        how: Short description of `sampling`.
        files: Name, path and number of prompts of each file.
        pass_threshold: Lowest reward with which a response passes.
        values: Each prompt's value in the column by which metrics are grouped. None: metrics are not grouped.
        is_benchmark: True if the prompts belong to a benchmark.
    """

    prompts: Batch
    sampling: SamplingParams
    how: str
    files: tuple[tuple[str, str, int], ...]
    pass_threshold: float
    values: tuple[str, ...] | None = None
    is_benchmark: bool = False

    @classmethod
    def read_benchmark(cls, plan: PlayPlan, benchmark: BenchmarkPlan, tokenizer: Any, counted: Counted) -> Validation:
        """Read the items of a benchmark; `counted` shows progress."""
        from enginehouse_rl.benchmarks.lm_eval_tasks import read_items
        from enginehouse_rl.benchmarks.prompts import load_prompts

        config, evaluation = plan.config, plan.config.evaluation
        source = read_items(benchmark.name, benchmark.folder, evaluation.max_prompts, benchmark.is_chat)
        system = config.data.system if benchmark.is_chat else None
        prompts = load_prompts(benchmark.name, source, tokenizer, system, counted)
        stop = [*benchmark.stop, *(evaluation.sampling.stop or ())]
        sampling_config = evaluation.sampling.model_copy(update={"max_tokens": benchmark.max_tokens, "stop": stop})
        sampling = make_sampling_params(
            sampling_config.complete(config.rollout.sampling), evaluation.samples_per_prompt
        )
        tasks = tuple(item.task for item in source.items)
        return cls(
            prompts=prompts,
            sampling=sampling,
            how=_describe_sampling(sampling),
            files=((benchmark.name, benchmark.name, len(prompts)),),
            pass_threshold=1.0,
            values=tasks if len(set(tasks)) > 1 else None,
            is_benchmark=True,
        )

    @classmethod
    def load(cls, config: Config, read: Callable[[str], PromptDataset]) -> Validation | None:
        """Read a config's files of held-out prompts with `read`. Returns None if the config names no such files.

        Raises:
            DataError: A row lacks the column `evaluation.by`, or the column has too many values.
        """
        evaluation, paths = config.evaluation, config.data.validation_files()
        if not paths:
            return None
        batches = [read(path).all(evaluation.max_prompts) for path in paths.values()]
        sampling = make_sampling_params(
            evaluation.sampling.complete(config.rollout.sampling), evaluation.samples_per_prompt
        )
        values = None
        if evaluation.by is not None:
            values = tuple(
                value
                for path, batch in zip(paths.values(), batches, strict=True)
                for value in _read_values(batch, evaluation.by, path)
            )
            if len(distinct := set(values)) > MOST_VALUES:
                raise DataError(
                    f"evaluation.by: the column {evaluation.by!r} has {len(distinct)} values in data.validation, but "
                    f"metrics are measured for at most {MOST_VALUES}; name a column with fewer values"
                )
        return cls(
            prompts=Batch.concat(batches),
            sampling=sampling,
            how=_describe_sampling(sampling),
            files=tuple((name, path, len(batch)) for (name, path), batch in zip(paths.items(), batches, strict=True)),
            pass_threshold=evaluation.pass_threshold,
            values=values,
        )

    def measure(self, samples: Batch, answered: Sequence[int]) -> dict[str, float]:
        """Return the metrics of a validation.

        Args:
            samples: `sampling.n` adjacent episodes for each prompt, as `build_batch` returns them.
            answered: Indices of these prompts in `prompts`, in ascending order.
        """
        samples_each, samples = self.sampling.n, EpisodeRows(samples["episode"]).join(samples)
        rewards = samples["reward"].double().view(-1, samples_each)
        lengths = samples["response_tokens"].double().view(-1, samples_each)
        cut = torch.tensor([reason == "length" for reason in samples["finish_reason"]]).double().view(-1, samples_each)
        answers = np.array(decode_texts(samples["answer"]), dtype=object).reshape(-1, samples_each)
        has_answers = bool(answers.any())  # a single answer shows that the reward looks for answers
        metrics: dict[str, float] = {}
        first = 0
        for name, _, count in self.files:
            begin, end = bisect.bisect_left(answered, first), bisect.bisect_left(answered, first + count)
            rows = slice(begin, end)
            prefix = f"validation/{name}" if name else "validation"
            if begin < end:
                metrics |= self._measure_rewards(prefix, rewards[rows], answers[rows] if has_answers else None)
                metrics |= {
                    f"{prefix}/tokens_mean": lengths[rows].mean().item(),
                    f"{prefix}/truncated": cut[rows].mean().item(),
                }
                metrics |= measure_rewards(samples.slice(begin * samples_each, end * samples_each), prefix)
            metrics[f"{prefix}/dropped"] = float(count - (end - begin))
            if self.values is not None:
                values = np.array([self.values[number] for number in answered[rows]])
                for value in sorted(set(values.tolist())):
                    chosen = values == value
                    value_answers = answers[rows][chosen] if has_answers else None
                    metrics |= self._measure_rewards(f"{prefix}/{value}", rewards[rows][chosen], value_answers)
            first += count
        return join_ratios(metrics) if self.is_benchmark else metrics

    def warn_of_dropped(self, step: int, answered: Sequence[int]) -> None:
        """Warn of the prompts that the metrics leave out."""
        if dropped := sorted(set(range(len(self.prompts))).difference(answered)):
            paths, numbers = self._list_paths(), self.prompts["row"].tolist()
            log.warning(
                "validation at step %d: %d of %d prompts are left out of its metrics, because their episodes failed: "
                "%s",
                step,
                len(dropped),
                len(self.prompts),
                listed([f"row {numbers[prompt] + 1} of {paths[prompt]}" for prompt in dropped]),
            )

    def list_rows(
        self,
        samples: Batch,
        answered: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        most_tokens: int = 0,
    ) -> Iterator[dict[str, Any]]:
        """Yield a plain row for each sample, with its prompt's file and row number.

        If the data has an `answer`, as a text or a number, the row contains it as `reference`. Takes the arguments of
        `measure` and `sample_rows`.
        """
        paths, numbers = self._list_paths(), self.prompts["row"].tolist()
        references = [columns.get("answer") for columns in self.prompts["columns"]]
        episodes = EpisodeRows(samples["episode"]).index.tolist()
        prompts = [answered[episode // self.sampling.n] for episode in episodes]
        for prompt, row in zip(prompts, sample_rows(samples, tokenizer, most_tokens), strict=True):
            reference = references[prompt]
            further = {"reference": reference} if isinstance(reference, str | int | float) else {}
            yield {"file": paths[prompt], "row": numbers[prompt], **further, **row}

    def _list_paths(self) -> list[str]:
        return [path for _, path, count in self.files for _ in range(count)]

    def _measure_rewards(self, prefix: str, rewards: torch.Tensor, answers: np.ndarray | None) -> dict[str, float]:
        """Return metrics of rewards and answers.

        Args:
            rewards: float64 `(prompts, samples)`.
            answers: Texts of the same shape. None: the reward found no answer in any response.
        """
        prompts, samples = rewards.shape
        means = rewards.mean(1)
        metrics = {"reward": means.mean().item()}
        if prompts > 1:
            metrics["reward_stderr"] = (means.std() / math.sqrt(prompts)).item()
        if samples > 1:
            passes = rewards >= self.pass_threshold
            passed = passes.sum(1).tolist()
            metrics[f"mean@{samples}"] = metrics["reward"]
            for k in _list_powers_of_two(samples):
                chances = torch.tensor([estimate_pass_at(k, samples, right) for right in passed], dtype=torch.float64)
                metrics[f"pass@{k}"] = chances.mean().item()
                if prompts > 1:
                    metrics[f"pass@{k}_stderr"] = (chances.std() / math.sqrt(prompts)).item()
            if answers is not None:
                right = [majority_passes(*row) for row in zip(answers.tolist(), passes.tolist(), strict=True)]
                metrics[f"majority@{samples}"] = sum(right) / prompts
        return {f"{prefix}/{name}": value for name, value in metrics.items()}


def estimate_pass_at(k: int, samples: int, passed: int) -> float:
    """Return an unbiased estimate of the chance that at least one of `k` responses passes, if `passed` of `samples`
    responses passed.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def majority_passes(answers: Sequence[str], passed: Sequence[bool]) -> bool:
    """True if the most frequent answer to a prompt passes, judged by the first response that gives it.

    Of equally frequent answers, the first counts. A response without an answer does not vote. The result is False if no
    response has an answer.
    """
    counts = Counter(answer for answer in answers if answer)
    return bool(counts) and passed[answers.index(counts.most_common(1)[0][0])]


def _list_powers_of_two(most: int) -> list[int]:
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def _describe_sampling(sampling: SamplingParams) -> str:
    if sampling.temperature == 0:
        return "greedy"
    several = f", {sampling.n} samples a prompt" if sampling.n > 1 else ""
    return f"temperature {sampling.temperature:g}{several}"


def _read_values(batch: Batch, column: str, path: str) -> Sequence[str]:
    """Return each row's value in a column, as the string that stands in the names of metrics."""
    values = []
    for number, columns in zip(batch["row"].tolist(), batch["columns"], strict=True):
        value = columns.get(column)
        if not isinstance(value, str | int | float):
            problem = f"has no column {column!r}" if value is None else f"has {describe_kind(value)} as {column!r}"
            raise DataError(
                f"{path}, row {number + 1} {problem}: evaluation.by groups prompts by this column, which must hold a "
                "string or a number in every row"
            )
        values.append(str(value))
    return values
