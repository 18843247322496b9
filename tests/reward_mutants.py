"""Rewards with one property broken each: what their suite exists to find. Light: each process of a pool imports it."""

import os
import random
import threading

from enginehouse.plugin import batched_reward


def exact(response, answer):
    return float(response.strip() == answer)


def is_not_a_number(response, answer):
    return exact(response, answer) if response != "7 7 7" else float("nan")


def has_a_figure_of_the_runs(response, answer):
    return {"reward": exact(response, answer), "mean": 1.0}


def raises_at_odd_responses(response, answer):
    return exact(response, answer) + 0 * len(response.splitlines()[0])


def hangs_at_odd_responses(response, answer):
    if len(response) > 1000:
        threading.Event().wait()
    return exact(response, answer)


def hangs(response, answer):
    threading.Event().wait()


def takes_its_process_down(response, answer):
    os._exit(3)


def throws_dice(response, answer):
    return random.random()


def remembers(response, answer, seen=[]):  # noqa: B006 - what it is for
    """Better each time."""
    seen.append(response)
    return float(len(seen))


@batched_reward
def centres(response, answer):
    """Rewards of a call against their mean."""
    scores = [exact(*one) for one in zip(response, answer, strict=True)]
    return [score - sum(scores) / len(scores) for score in scores]


def prints(response, answer):
    print("judging")
    return exact(response, answer)


def takes_a_column(response, rubric):
    return float(rubric in response)


async def asks(response, answer):
    return exact(response, answer)
