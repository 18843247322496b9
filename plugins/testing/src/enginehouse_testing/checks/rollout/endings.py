"""Where completions end, and what is refused."""

from __future__ import annotations

from typing import Any

from enginehouse.errors import EnginehouseError
from enginehouse.plugin import capabilities
from enginehouse_testing.check import PROTOCOL, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE, logprob_error, of_one, serves
from enginehouse_testing.models import CHARACTERS, EOS_ID, SPECIAL_TOKENS, VOCABULARY_SIZE
from enginehouse_testing.prompts import MAX_MODEL_TOKENS, prompts
from enginehouse_testing.replica import Drawn, Replica

LENGTH = 40
STOPS = (9, 17)
HOT: dict[str, Any] = {"n": 24, "max_tokens": LENGTH, "temperature": 2.0}


async def _ends(replica: Replica) -> dict[str, list[Drawn]]:
    given = prompts(2, seed=7)
    return {
        "end of sequence": await replica.draw(*given, **HOT),
        "ignore_eos": await replica.draw(*given, **HOT, ignore_eos=True),
        "stop_token_ids": await replica.draw(*given, **HOT, ignore_eos=True, stop_token_ids=STOPS),
        "both": await replica.draw(*given, **HOT, stop_token_ids=STOPS),
    }


ENDS = {"end of sequence": (EOS_ID,), "ignore_eos": (), "stop_token_ids": STOPS, "both": (EOS_ID, *STOPS)}
MUST_HOLD = {"ignore_eos": EOS_ID, "stop_token_ids": EOS_ID}


@of_one
def _judge_ends(drawn: dict[str, list[Drawn]]) -> Measured:
    said = [f"{what}: {unlike}" for what, completions in drawn.items() if (unlike := _unlike(what, completions))]
    return wrong("; ".join(said)) if said else logprob_error_at(drawn)


def _unlike(what: str, completions: list[Drawn]) -> str:
    """In words, how one of some completions that were drawn for the same end ends otherwise; empty: none does."""
    ends = ENDS[what]
    for one in completions:
        at = next((i for i, token in enumerate(one.tokens) if token in ends), None)
        expected = (LENGTH, "length") if at is None else (at + 1, "stop")
        if at is None and one.reason == "stop":
            return f"a completion stopped, and its last token is not one that ends it: {one.tokens}"
        if (len(one.tokens), one.reason) != expected:
            return (
                f"a completion has {len(one.tokens)} tokens and finish reason {one.reason!r}, "
                f"not {expected[0]} and {expected[1]!r}"
            )
    if bool(ends) != ("stop" in {one.reason for one in completions}):
        return f"no completion of {len(completions)} came to what it was drawn for"
    if what in MUST_HOLD and not any(MUST_HOLD[what] in one.tokens for one in completions):
        return f"no completion of {len(completions)} goes on after the model's end of sequence"
    return ""


def logprob_error_at(drawn: dict[str, list[Drawn]]) -> Measured:
    """Of some completions of each sort: the last token's logprob counts as any other's."""
    return logprob_error("tied", [one for completions in drawn.values() for one in completions[::6]], 2.0)


async def _stop_strings(replica: Replica) -> tuple[list[Drawn], list[Drawn], str] | None:
    for prompt in prompts(24, seed=8):
        plain = await replica.draw(prompt, temperature=0.0, max_tokens=16, ignore_eos=True)
        first = plain[0].tokens[:4]
        if len(set(first)) == 4 and min(first) >= len(SPECIAL_TOKENS):
            stop = "".join(CHARACTERS[token - len(SPECIAL_TOKENS)] for token in first[2:])
            stopped = await replica.draw(prompt, temperature=0.0, max_tokens=16, ignore_eos=True, stop=(stop,))
            return plain, stopped, stop
    return None


@of_one
def _judge_stop_strings(found: tuple[list[Drawn], list[Drawn], str] | None) -> Measured:
    if found is None:
        return wrong("no greedy completion begins with four different characters: nothing to stop at")
    (plain,), (stopped,), stop = found
    if (stopped.tokens, stopped.reason) != (plain.tokens[:4], "stop"):
        return wrong(
            f"stop {stop!r} is complete with the fourth token of {plain.tokens}; "
            f"finish reason {stopped.reason!r} after {stopped.tokens}"
        )
    return serves("tied", [stopped])


REFUSED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "a sequence longer than the engine takes": ([5] * (MAX_MODEL_TOKENS - 1), {"max_tokens": 2}),
    "an empty prompt": ([], {}),
    "a token id beyond the vocabulary": ([5, VOCABULARY_SIZE + 100_000], {}),
    "a negative token id": ([5, -1], {}),
    "n 0": ([5], {"n": 0}),
    "a negative temperature": ([5], {"temperature": -1.0}),
    "top_p 0": ([5], {"top_p": 0.0}),
}


async def _refused(replica: Replica) -> tuple[dict[str, str], list[Drawn]]:
    found = {}
    for what, (prompt, sampling) in REFUSED.items():
        try:
            await replica.request(prompt, **{"max_tokens": 2, **sampling})
            found[what] = "was served"
        except EnginehouseError:
            pass
        except Exception as error:
            found[what] = f"raised {type(error).__name__}: {error}"
    longest = await replica.draw([5] * (MAX_MODEL_TOKENS - 2), max_tokens=2, temperature=0.0, ignore_eos=True)
    return found, longest


@of_one
def _judge_refused(found: tuple[dict[str, str], list[Drawn]]) -> Measured:
    unlike, longest = found
    if unlike:
        listed = "; ".join(f"{what} {how}" for what, how in unlike.items())
        return Measured(len(unlike), f"{listed}. generate has to raise an EnginehouseError for each")
    full = len(longest[0].tokens) == 2
    return Measured(float(not full), "" if full else "the longest sequence it may take was cut short")


CHECKS = (
    RolloutCheck(
        name="ends",
        capability=PROTOCOL,
        claim="A completion ends with the first token that ends it, kept, or at max_tokens, and says which",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_ends,),
        judge=_judge_ends,
    ),
    RolloutCheck(
        name="stop_strings",
        capability=capabilities.STOP_STRINGS,
        claim="A stop string over two tokens ends a completion once it is complete, its tokens kept",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_stop_strings,),
        judge=_judge_stop_strings,
    ),
    RolloutCheck(
        name="refused",
        capability=PROTOCOL,
        claim="What cannot be served is an EnginehouseError of its own request, and the longest that can be is served",
        tolerance=0.0,
        acts=(_refused,),
        judge=_judge_refused,
    ),
)
