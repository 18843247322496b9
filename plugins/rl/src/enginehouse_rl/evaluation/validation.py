"""Validation: held-out prompts, answered greedily unless the config says otherwise, and measured.

| metric, after `validation/` and the name of the file where there are several | |
|---|---|
| `reward` | mean over prompts of the mean reward of their responses |
| `reward_stderr` | standard error of that mean over prompts |
| `mean@K` | the same as `reward`, by the name it has for K samples a prompt |
| `pass@k`, k = 1, 2, 4, ... K | chance that one of k responses passes: Chen et al. 2021 (Codex), equation 1 |
| `pass@k_stderr` | standard error of that chance over prompts |
| `majority@K` | share of prompts whose responses agree on a right answer; where the reward says what they answer |
| `tokens_mean` | tokens of a response, of all rows of its episode |
| `truncated` | share of responses that were cut at `max_tokens` |
| `dropped` | prompts that the others are not of, as responses could not be made (`rollout.on_failure`) |

Where `evaluation.by` names a column, `VALUE/reward` and so on are of the rows that have that value in it.
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
"""Most values of the column `evaluation.by`: each has figures of its own."""


@dataclass(frozen=True)
class Validation:
    """The held-out prompts of a run, and how they are answered and measured.

    Attributes:
        prompts: those of all files, one file after another; columns as `PromptDataset.rows` gives them.
        sampling: how they are answered.
        how: `sampling` in a word or two, for people.
        files: of each file, its name, its path and its number of prompts.
        pass_threshold: least reward of a response that passes.
        values: of each prompt, its value in the column by which figures are measured too; None: by none.
        is_benchmark: whether the prompts are of a benchmark.
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
        """Read the items of a benchmark; `counted` shows how many are done."""
        from enginehouse_rl.benchmarks.lm_eval_tasks import read_items
        from enginehouse_rl.benchmarks.prompts import load_prompts

        config, evaluation = plan.config, plan.config.evaluation
        source = read_items(benchmark.name, benchmark.folder, evaluation.max_prompts, benchmark.is_chat)
        system = config.data.system if benchmark.is_chat else None
        prompts = load_prompts(benchmark.name, source, tokenizer, system, counted)
        stop = [*benchmark.stop, *(evaluation.sampling.stop or ())]
        drawn = evaluation.sampling.model_copy(update={"max_tokens": benchmark.max_tokens, "stop": stop})
        sampling = make_sampling_params(drawn.complete(config.rollout.sampling), evaluation.samples_per_prompt)
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
        """Read a config's files of held-out prompts, by `load`; None where it has none.

        Raises:
            DataError: a row lacks the column `evaluation.by`, or that has too many values.
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
                    f"evaluation.by: the column {evaluation.by!r} has {len(distinct)} values in data.validation, and "
                    f"figures are measured for at most {MOST_VALUES}; name a column that sorts prompts into few kinds"
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
        """The metrics of a validation.

        Args:
            samples: `sampling.n` adjacent episodes a prompt, as of `batch_of`.
            answered: the numbers of their prompts, ascending.
        """
        each, samples = self.sampling.n, EpisodeRows(samples["episode"]).join(samples)
        rewards = samples["reward"].double().view(-1, each)
        lengths = samples["response_tokens"].double().view(-1, each)
        cut = torch.tensor([reason == "length" for reason in samples["finish_reason"]]).double().view(-1, each)
        answers = np.array(decode_texts(samples["answer"]), dtype=object).reshape(-1, each)
        said = bool(answers.any())  # by one: the reward looks for them
        found: dict[str, float] = {}
        first = 0
        for name, _, count in self.files:
            begin, end = bisect.bisect_left(answered, first), bisect.bisect_left(answered, first + count)
            rows = slice(begin, end)
            prefix = f"validation/{name}" if name else "validation"
            if begin < end:
                found |= self._measure_rewards(prefix, rewards[rows], answers[rows] if said else None)
                found |= {
                    f"{prefix}/tokens_mean": lengths[rows].mean().item(),
                    f"{prefix}/truncated": cut[rows].mean().item(),
                }
                found |= measure_rewards(samples.slice(begin * each, end * each), prefix)
            found[f"{prefix}/dropped"] = float(count - (end - begin))
            if self.values is not None:
                here = np.array([self.values[number] for number in answered[rows]])
                for value in sorted(set(here.tolist())):
                    chosen = here == value
                    of_value = answers[rows][chosen] if said else None
                    found |= self._measure_rewards(f"{prefix}/{value}", rewards[rows][chosen], of_value)
            first += count
        return join_ratios(found) if self.is_benchmark else found

    def warn_of_dropped(self, step: int, answered: Sequence[int]) -> None:
        """Name the prompts that figures are not of."""
        if dropped := sorted(set(range(len(self.prompts))).difference(answered)):
            paths, numbers = self._paths(), self.prompts["row"].tolist()
            log.warning(
                "validation at step %d: %d of %d prompts are left out of its figures, as their episodes failed: %s",
                step,
                len(dropped),
                len(self.prompts),
                listed([f"row {numbers[prompt]} of {paths[prompt]}" for prompt in dropped]),
            )

    def list_rows(
        self,
        samples: Batch,
        answered: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        most_tokens: int = 0,
    ) -> Iterator[dict[str, Any]]:
        """What the model said, a plain row a sample, with the file and the row of its prompt. Arguments as of
        `figures` and `sample_rows`."""
        paths, numbers = self._paths(), self.prompts["row"].tolist()
        episodes = EpisodeRows(samples["episode"]).index.tolist()
        prompts = [answered[episode // self.sampling.n] for episode in episodes]
        for prompt, row in zip(prompts, sample_rows(samples, tokenizer, most_tokens), strict=True):
            yield {"file": paths[prompt], "row": numbers[prompt], **row}

    def _paths(self) -> list[str]:
        """The file of each prompt."""
        return [path for _, path, count in self.files for _ in range(count)]

    def _measure_rewards(self, prefix: str, rewards: torch.Tensor, answers: np.ndarray | None) -> dict[str, float]:
        """Figures of rewards, float64 `(prompts, samples)`, and of answers, texts alike; None: there are none."""
        prompts, each = rewards.shape
        means = rewards.mean(1)
        found = {"reward": means.mean().item()}
        if prompts > 1:
            found["reward_stderr"] = (means.std() / math.sqrt(prompts)).item()
        if each > 1:
            passes = rewards >= self.pass_threshold
            passed = passes.sum(1).tolist()
            found[f"mean@{each}"] = found["reward"]
            for k in _powers_of_two(each):
                chances = torch.tensor([pass_at(k, each, right) for right in passed], dtype=torch.float64)
                found[f"pass@{k}"] = chances.mean().item()
                if prompts > 1:
                    found[f"pass@{k}_stderr"] = (chances.std() / math.sqrt(prompts)).item()
            if answers is not None:
                right = [majority_passes(*row) for row in zip(answers.tolist(), passes.tolist(), strict=True)]
                found[f"majority@{each}"] = sum(right) / prompts
        return {f"{prefix}/{name}": value for name, value in found.items()}


def pass_at(k: int, samples: int, passed: int) -> float:
    """Chance that one of `k` responses passes, of `samples` drawn of which `passed` did: the unbiased estimator.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def majority_passes(answers: Sequence[str], passed: Sequence[bool]) -> bool:
    """Whether the answer passes that most of a prompt's responses give: as the first response with it does.

    Of answers that as many give, the first is taken. A response without an answer has no vote; if none has one, no
    answer passes.
    """
    given = Counter(answer for answer in answers if answer)
    return bool(given) and passed[answers.index(given.most_common(1)[0][0])]


def _powers_of_two(most: int) -> list[int]:
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def _describe_sampling(sampling: SamplingParams) -> str:
    if sampling.temperature == 0:
        return "greedy"
    several = f", {sampling.n} samples a prompt" if sampling.n > 1 else ""
    return f"temperature {sampling.temperature:g}{several}"


def _read_values(batch: Batch, column: str, path: str) -> Sequence[str]:
    """Each row's value in a column, as it is called in a metric."""
    found = []
    for number, columns in zip(batch["row"].tolist(), batch["columns"], strict=True):
        value = columns.get(column)
        if not isinstance(value, str | int | float):
            lacks = f"has no column {column!r}" if value is None else f"has a {type(value).__name__} as {column!r}"
            raise DataError(
                f"{path}, row {number} {lacks}, by which evaluation.by sorts prompts: a string, or a number"
            )
        found.append(str(value))
    return found
