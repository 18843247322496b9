"""Environments with one property broken each: what their suite exists to find."""

import asyncio
import time
from dataclasses import replace

from enginehouse.engines.environment import Episode, Scored
from enginehouse.engines.transcript import Transcript


class TwoTurns:
    """Asks twice, with a word of the environment's between. What mutants break they override."""

    samples = None

    async def run(self, task, policy, context):
        return await context.each(lambda number, branch: self.play(task, branch, context))

    async def play(self, task, policy, context):
        tokens, mask, logprobs, versions = list(task.prompt_ids), [], [], []
        mask, logprobs, versions = [False] * len(tokens), [0.0] * len(tokens), [0] * len(tokens)
        for turn in range(2):
            one = await policy.generate(self.asked(policy, tokens))
            new = list(one.token_ids)
            tokens += new
            mask += [True] * len(new)
            logprobs += self.logprobs(one)
            versions += [one.first_version] * len(new)
            if turn == 0:
                given = policy.tokenizer(" and", add_special_tokens=False)["input_ids"]
                tokens += given
                mask += [self.counts_given] * len(given)
                logprobs += [0.0] * len(given)
                versions += [0] * len(given)
        (score,) = await context.score([{**task.columns, "response": policy.tokenizer.decode(tokens)}])
        return Episode(tokens, mask, logprobs, versions, score)

    counts_given = False

    def asked(self, policy, tokens):
        return list(tokens)

    def logprobs(self, completion):
        return list(completion.logprobs)


class CountsItsOwnWords(TwoTurns):
    counts_given = True


class AsksForSomethingElse(TwoTurns):
    """As one that renders the conversation anew for each turn."""

    def asked(self, policy, tokens):
        return policy.tokenizer("again: ", add_special_tokens=False)["input_ids"] + tokens


class RoundsLogprobs(TwoTurns):
    def logprobs(self, completion):
        return [round(one, 1) for one in completion.logprobs]


class OneTooFew(TwoTurns):
    async def run(self, task, policy, context):
        return (await super().run(task, policy, context))[1:]


class LosesALogprob(TwoTurns):
    async def play(self, task, policy, context):
        made = await super().play(task, policy, context)
        return replace(made, logprobs=[*made.logprobs, 0.0])


class ForgetsItsFirstTurn(TwoTurns):
    """Right: the second turn is a row of its own, which begins with what the first said."""

    counts_twice = False

    async def play(self, task, policy, context):
        said, rows = Transcript(task.prompt_ids), []
        for _ in range(2):
            given = len(said.tokens)
            said.add_drawn(await policy.generate(said.tokens))
            rows.append(said.segment())
            if not self.counts_twice:
                said = Transcript(said.tokens[given:])
        (score,) = await context.score([{"response": policy.tokenizer.decode(rows[1].tokens)}])
        last = rows[1]
        return Episode(last.tokens, last.mask, last.logprobs, last.versions, score, earlier=rows[:1])


class CountsItsFirstTurnTwice(ForgetsItsFirstTurn):
    counts_twice = True


class OrdersItsRowsByTime(ForgetsItsFirstTurn):
    """Two branches, of which the one that ends first is the first row."""

    async def play(self, task, policy, context):
        rows = []

        async def branch(number):
            said = Transcript([*task.prompt_ids, *policy.tokenizer(str(number), add_special_tokens=False)["input_ids"]])
            said.add_drawn(await policy.branch(f"branch-{number}").generate(said.tokens))
            rows.append(said.segment())

        await asyncio.gather(branch(0), branch(1))
        said = Transcript(task.prompt_ids)
        said.add_drawn(await policy.generate(said.tokens))
        return said.episode(Scored(1.0), earlier=rows)


class FirstComeFirst(TwoTurns):
    async def run(self, task, policy, context):
        ended = []

        async def play(number, branch):
            ended.append(await self.play(task, branch, context))
            return ended[-1]

        await context.each(play)
        return ended


class Remembers(TwoTurns):
    """Tasks share what only one of them should know."""

    under_way = 0

    async def play(self, task, policy, context):
        self.under_way += 1
        beside = self.under_way > context.samples
        made = await super().play(task, policy, context)
        self.under_way -= 1
        return replace(made, tokens=made.tokens[::-1]) if beside else made


class Blocks(TwoTurns):
    async def play(self, task, policy, context):
        time.sleep(0.15)
        return await super().play(task, policy, context)


class CannotBeCancelled(TwoTurns):
    async def run(self, task, policy, context):
        try:
            return await super().run(task, policy, context)
        except asyncio.CancelledError:
            return []


class SwallowsErrors(TwoTurns):
    async def run(self, task, policy, context):
        try:
            return await super().run(task, policy, context)
        except RuntimeError:
            return []
