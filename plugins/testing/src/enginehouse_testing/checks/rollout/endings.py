"""Checks where completions end, and which requests are rejected."""

from __future__ import annotations

from typing import Any

from enginehouse.errors import EnginehouseError
from enginehouse.plugin import capabilities
from enginehouse_testing.check import EXACT, Checks, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE, logprob_error, serves
from enginehouse_testing.models import CHARACTERS, EOS_ID, SPECIAL_TOKENS, VOCABULARY_SIZE
from enginehouse_testing.prompts import MAX_MODEL_TOKENS, prompts
from enginehouse_testing.replica import ReplicaTrial, SampledCompletion

LENGTH = 40
STOPS = (9, 17)
HOT: dict[str, Any] = {"n": 24, "max_tokens": LENGTH, "temperature": 2.0}
ENDS = {"end of sequence": (EOS_ID,), "ignore_eos": (), "stop_token_ids": STOPS, "both": (EOS_ID, *STOPS)}
"""Tokens that end a completion, by the request's parameters."""
CONTINUE_AFTER_EOS = ("ignore_eos", "stop_token_ids")

CHECKS = Checks(RolloutCheck, tolerance=LOGPROB_TOLERANCE)


async def _generate_to_ends(replica: ReplicaTrial) -> dict[str, list[SampledCompletion]]:
    rows = prompts(2, seed=7)
    return {
        "end of sequence": await replica.draw(*rows, **HOT),
        "ignore_eos": await replica.draw(*rows, **HOT, ignore_eos=True),
        "stop_token_ids": await replica.draw(*rows, **HOT, ignore_eos=True, stop_token_ids=STOPS),
        "both": await replica.draw(*rows, **HOT, stop_token_ids=STOPS),
    }


@CHECKS.judge(_generate_to_ends)
def ends(completions: dict[str, list[SampledCompletion]]) -> Measured:
    """A completion ends with the first stop token, which is kept, or at max_tokens, and reports the reason."""
    mistakes = [f"{case}: {mistake}" for case, sampled in completions.items() if (mistake := _wrong_end(case, sampled))]
    if mistakes:
        return wrong("; ".join(mistakes))
    # The last token's logprob is checked like any other.
    return logprob_error("tied", [completion for sampled in completions.values() for completion in sampled[::6]], 2.0)


def _wrong_end(case: str, completions: list[SampledCompletion]) -> str:
    """Describe the first completion that does not end as requested; empty if there is none."""
    for completion in completions:
        tokens, reason = completion.tokens, completion.reason
        at = next((i for i, token in enumerate(tokens) if token in ENDS[case]), None)
        expected = (LENGTH, "length") if at is None else (at + 1, "stop")
        if at is None and reason == "stop":
            return f"a completion reports 'stop', but its last token is no stop token: {tokens}"
        if (len(tokens), reason) != expected:
            return (
                f"a completion has {len(tokens)} tokens and finish reason {reason!r}, "
                f"not {expected[0]} and {expected[1]!r}"
            )
    if bool(ENDS[case]) != ("stop" in {completion.reason for completion in completions}):
        return f"no completion of {len(completions)} ended in the way that this case tests"
    if case in CONTINUE_AFTER_EOS and not any(EOS_ID in completion.tokens for completion in completions):
        return f"no completion of {len(completions)} continues after the model's end of sequence, as requested"
    return ""


async def _stop_at_string(replica: ReplicaTrial) -> tuple[SampledCompletion, SampledCompletion, str] | None:
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    for prompt in prompts(24, seed=8):
        (plain,) = await replica.draw(prompt, **greedy)
        first = plain.tokens[:4]
        if len(set(first)) == 4 and min(first) >= len(SPECIAL_TOKENS):
            stop = "".join(CHARACTERS[token - len(SPECIAL_TOKENS)] for token in first[2:])
            (stopped,) = await replica.draw(prompt, **greedy, stop=(stop,))
            return plain, stopped, stop
    return None


@CHECKS.judge(_stop_at_string, capability=capabilities.STOP_STRINGS)
def stop_strings(result: tuple[SampledCompletion, SampledCompletion, str] | None) -> Measured:
    """A stop string that spans two tokens ends a completion as soon as it is complete; its tokens are kept."""
    if result is None:
        return wrong("no greedy completion begins with four different characters, so no stop string can be tested")
    plain, stopped, stop = result
    if (stopped.tokens, stopped.reason) != (plain.tokens[:4], "stop"):
        return wrong(
            f"the stop string {stop!r} is complete with the fourth token of {plain.tokens}, "
            f"but the completion ended with {stopped.reason!r} after {stopped.tokens}"
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


async def _request_the_impossible(replica: ReplicaTrial) -> tuple[dict[str, str], list[SampledCompletion]]:
    mistakes = {}
    for what, (prompt, sampling) in REFUSED.items():
        try:
            await replica.request(prompt, **{"max_tokens": 2, **sampling})
            mistakes[what] = "was served"
        except EnginehouseError:
            pass
        except Exception as error:
            mistakes[what] = f"raised {type(error).__name__}: {error}"
    longest = await replica.draw([5] * (MAX_MODEL_TOKENS - 2), max_tokens=2, temperature=0.0, ignore_eos=True)
    return mistakes, longest


@CHECKS.judge(_request_the_impossible, tolerance=EXACT)
def refused(result: tuple[dict[str, str], list[SampledCompletion]]) -> Measured:
    """A request that cannot be served fails with an EnginehouseError, and no other request does; the longest possible
    request is served."""
    mistakes, longest = result
    if mistakes:
        listed = "; ".join(f"{what} {how}" for what, how in mistakes.items())
        return Measured(len(mistakes), f"{listed}. generate must raise an EnginehouseError for each")
    full = len(longest[0].tokens) == 2
    return Measured(float(not full), "" if full else "a request of the maximum length was cut short")
