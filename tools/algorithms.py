"""Writes docs/algorithms.md, on every advantage and loss, and docs/comparisons.md, on the code they were compared with.

`make algorithms` writes both from the records, the functions' docstrings, and the cases of verl's and TRL's code in
`tests/rl/oracles/cases.json`.
"""

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from enginehouse.plugin import Function, load_plugins, resolve
from enginehouse.plugin.arguments import KL_ARGUMENTS, Argument, arguments_of
from enginehouse_rl.config.schema import KLEstimator
from enginehouse_rl.losses.aggregate import AGGREGATIONS
from enginehouse_rl.losses.policy import SHARED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "algorithms.md"
COMPARED = ROOT / "docs" / "comparisons.md"
CASES = ROOT / "tests" / "rl" / "oracles" / "cases.json"
HEAD = """\
# Advantages and losses

For users who look up the arguments of an algorithm; to pick one, see [Choose an algorithm](choosing.md). `make
algorithms` wrote this page. An algorithm is an advantage and a loss, `algorithm.advantage.name` and
`algorithm.loss.name`, with their `arguments`. To write your own, see [advantages](plugins/advantage.md) and
[losses](plugins/loss.md). The formulas were compared with the code of verl and TRL: [the comparison](comparisons.md).
"""
COMPARED_HEAD = """\
# Comparison with the code of verl and TRL

For contributors, and for users who compare their results with those of verl or TRL. `make algorithms` wrote this page.
"""
MEANS = {
    "token_mean": ("token-mean", "dapo"),
    "sequence_mean_token_mean": ("seq-mean-token-mean", "grpo"),
    "sequence_mean_token_sum": ("seq-mean-token-sum", ""),
    "sequence_mean_token_sum_scaled": ("seq-mean-token-sum-norm", "dr_grpo"),
}
"""By our name of a reduction, the name in verl (`loss_agg_mode`) and the name in TRL (`loss_type`)."""
ELSEWHERE = {
    "process_rewards": "`rl/test_advantages.py`: the paper's sum, and `grpo` where there are no steps",
    "supervised": "`rl/test_losses.py`: torch's cross entropy",
    "weighted_logprob": "`rl/test_losses.py`: the gradient of `clipped_policy`, by its weights",
    "weighted_value": "`rl/test_losses.py`: `weighted_logprob`, of values",
}
"""Tests of the advantages and losses that neither verl nor TRL has."""
APART = """
Where ours and theirs differ, on purpose:

- A group of one sample has an advantage of 0; in verl, its advantage is its reward.
- Equal rewards give advantages of exactly 0. In verl, the rounded mean leaves a tiny number, which a division by a tiny
  deviation makes large: `grpo` gives 0.1 for eleven equal rewards of 0.7 in float32.
- `gdpo` is normalized over samples, as in the paper and in TRL; verl normalizes it over tokens. So the comparison has
  responses of one token.
- `gpg` counts the samples of groups with a gradient, as the paper does; verl counts samples whose reward is not 0.
- `grpo` adds 1e-6 to the deviation, as verl does; TRL adds 1e-4.
- Log ratios are capped at 20 nats before exponentiation. verl bounds them at -20 and 20, and `k3` at 10, so a policy
  that is further off gets no gradient.
- Importance weights (`importance_cap`) also weigh the KL term; in TRL they do not.
- With a KL term in the reward, `grpo`, `gpg`, `process_rewards` and `reinforce_plus_plus_baseline` normalize only the
  rewards. They then subtract the term, less its group's mean. verl normalizes both, so in a group of equal rewards the
  term counts fully.
- The upper bound of `cispo` is `1 + clip_high`, as in verl; in TRL it is `epsilon_high`, without a lower bound.
- Tokens that do not count have an advantage and a return of 0; verl's `gae` leaves other numbers there.
- TRL's entropy bonus is always a mean over tokens; ours is a part of each token's loss.
"""


def page() -> str:
    """Return the text of docs/algorithms.md."""
    lines = [HEAD, "## Advantages\n", *_advantages(), "\n## Losses\n", *_losses(), "\n## Means\n"]
    lines += ["`aggregation` of a loss:\n", "| here | verl's `loss_agg_mode` | TRL's `loss_type` |", "|---|---|---|"]
    lines += [_row(f"`{ours}`", *(f"`{name}`" if name else "" for name in MEANS[ours])) for ours in AGGREGATIONS]
    return "\n".join(lines) + "\n"


def compared_page() -> str:
    """Return the text of docs/comparisons.md."""
    written = json.loads(CASES.read_text(encoding="utf-8"))
    return "\n".join([COMPARED_HEAD, *_compared(written)]) + "\n"


def _advantages() -> Iterator[str]:
    yield from ("| name | what it is | columns | arguments |", "|---|---|---|---|")
    for record in _records("advantage"):
        yield _row(f"`{record.name}`", record.summary, _names(record.needs), _words(arguments_of(_of(record), 1)))


def _losses() -> Iterator[str]:
    records = list(_records("loss"))
    yield from ("| name | what it is | arguments |", "|---|---|---|")
    for record in records:
        arguments = arguments_of(_of(record), 1)
        policy = SHARED.keys() <= {argument.name for argument in arguments}
        own = [argument for argument in arguments if not policy or argument.name not in SHARED]
        default = inspect.signature(_of(record)).parameters["aggregation"].default if policy else None
        also = f"those of all policy losses, `aggregation` by default `{default}`" if policy else ""
        yield _row(f"`{record.name}`", record.summary, "; ".join(filter(None, [_words(own), also])))
    names = SHARED.keys() - set(KL_ARGUMENTS)
    shared = [argument for argument in arguments_of(_of(records[0]), 1) if argument.name in names]
    yield "\nAll policy losses take, besides the KL term (`algorithm.kl`):\n"
    yield from ("| argument | type | what it is |", "|---|---|---|")
    for argument in shared:
        yield _row(f"`{argument.name}`", argument.type, argument.description)
    yield (
        f"\nThe estimators of the KL term are {_names(get_args(KLEstimator))}. In the reward, the KL term must use "
        "`k1`.\nIn the loss, it must use one of the others; the default is `k3`. `k3_unbiased` is from DeepSeek-V3.2: "
        "it multiplies\n`k3` by the policy ratio, which contributes to the gradient. Log ratios are capped at 20 nats "
        "before exponentiation."
    )


def _compared(written: Mapping[str, Any]) -> Iterator[str]:
    packages = " and ".join(f"{name} {version}" for name, version in written["packages"].items())
    yield (
        f"`tests/rl/oracles/make.py` ran the code of {packages} on rows of several turns and stored the results.\n"
        "`tests/rl/test_oracles.py` compares the results of our functions with the stored results. For losses and the "
        "KL term it\n"
        "also compares the gradient with respect to each logprob (for `clipped_value`, to each value). All agree to "
        "1e-6.\n"
    )
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for case in written["cases"]:
        arguments = found[f"{case['kind']} `{case['name']}`", f"`{case['theirs']}`"]
        for name, value in case["arguments"].items():
            arguments[name].append(str(value))
    yield from ("| ours | theirs | with |", "|---|---|---|")
    for (ours, theirs), arguments in sorted(found.items()):
        yield _row(
            ours, theirs, "; ".join(f"`{name}` {', '.join(dict.fromkeys(arguments[name]))}" for name in arguments)
        )
    for name, where in ELSEWHERE.items():
        yield _row(f"`{name}`", "neither has it", where)
    yield APART.rstrip("\n")


def _records(kind: str) -> Iterator[Any]:
    """Return core's own records of a kind, by name."""
    provided = (provider.record for provider in load_plugins(enabled=[]).providers() if provider.plugin.internal)
    return iter(sorted((record for record in provided if record.kind == kind), key=lambda record: record.name))


def _of(record: Function) -> Any:
    return resolve(record.function)


def _words(arguments: list[Argument]) -> str:
    return "; ".join(
        f"`{argument.name}` ({argument.type}; default {argument.default}): {argument.description.rstrip('.')}"
        for argument in arguments
    )


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(*cells: str) -> str:
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    COMPARED.write_text(compared_page(), encoding="utf-8")
