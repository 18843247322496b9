"""Rollout engines with one property broken each: what the conformance suite exists to find.

In a module of its own because worker processes import it by name.
"""

import asyncio
import contextlib
import math
import subprocess
from dataclasses import replace

import torch

from enginehouse.engines.model import ModelSpec
from enginehouse.engines.train import ALL
from enginehouse.engines.weights import WeightState
from enginehouse.errors import ModelError
from enginehouse.weights.checksums import checksum
from enginehouse_testing.models import SPECIAL_TOKENS
from enginehouse_torch.rollout import TorchRolloutEngine


class Altered(TorchRolloutEngine):
    """Changes requests on their way in and completions on their way out."""

    async def generate(self, request):
        result = await super().generate(replace(request, **self.asked(request)))
        return replace(result, completions=[self.answered(request, one) for one in result.completions])

    def asked(self, request):
        return {}

    def answered(self, request, completion):
        return completion


class OffByOne(Altered):
    """Gives each logprob to the token before its own."""

    def answered(self, request, completion):
        return replace(completion, logprobs=[*completion.logprobs[1:], *completion.logprobs[:1]])


class SeedIgnored(Altered):
    """Draws afresh whatever the seed."""

    def asked(self, request):
        return {"sampling": replace(request.sampling, seed=None)}


class Retokenised(Altered):
    """Turns the prompt to text and back, which loses special tokens."""

    def asked(self, request):
        return {"prompt_ids": [one for one in request.prompt_ids if one not in range(len(SPECIAL_TOKENS))]}


class TemperatureForgotten(Altered):
    """Draws at temperature 1, unless greedily."""

    def asked(self, request):
        asked = request.sampling.temperature
        return {"sampling": replace(request.sampling, temperature=1.0 if asked > 0 else asked)}


class LogprobsAfterTopP(Altered):
    """Gives logprobs of the distribution that top-p left."""

    def answered(self, request, completion):
        kept = math.log(request.sampling.top_p)
        return replace(completion, logprobs=[one - kept for one in completion.logprobs])


class TopKIgnored(Altered):
    """Draws from all tokens."""

    def asked(self, request):
        return {"sampling": replace(request.sampling, top_k=0)}


class StopTokenDropped(Altered):
    """Gives a completion without the token that ended it."""

    def answered(self, request, completion):
        if completion.finish_reason != "stop":
            return completion
        return replace(completion, token_ids=completion.token_ids[:-1], logprobs=completion.logprobs[:-1])


class EndIgnored(Altered):
    """Never stops at the model's end of sequence."""

    def asked(self, request):
        return {"sampling": replace(request.sampling, ignore_eos=True)}


class SamplesRepeated(TorchRolloutEngine):
    """Draws one completion and gives it n times."""

    async def generate(self, request):
        result = await super().generate(request)
        return replace(result, completions=[result.completions[0]] * request.sampling.n)


class CompletionMissing(TorchRolloutEngine):
    """Gives a request a completion less than it asked for, and the next one more."""

    spare = None

    async def generate(self, request):
        result = await super().generate(request)
        if request.sampling.n == 1:
            return result
        completions = [*result.completions, *([self.spare] if self.spare else [])]
        self.spare = None if self.spare else completions.pop()
        return replace(result, completions=completions)


class AbortLosesTokens(Altered):
    """Gives nothing of what an aborted request had."""

    def answered(self, request, completion):
        return replace(completion, token_ids=[], logprobs=[]) if completion.finish_reason == "abort" else completion


class VersionOff(Altered):
    """Says the version before the one it drew from."""

    def answered(self, request, completion):
        return replace(completion, last_version=completion.last_version - 1, first_version=completion.first_version - 1)


class PauseIgnored(TorchRolloutEngine):
    """Goes on serving, and says it is paused."""

    said = False

    async def pause(self, mode="abort"):
        self.said = True

    async def resume(self):
        self.said = False

    async def health(self):
        return replace(await super().health(), paused=self.said)


class KeptAborted(TorchRolloutEngine):
    """Ends what it was to keep."""

    async def pause(self, mode="abort"):
        await super().pause("abort" if mode in ("keep", "keep_cache") else mode)


class OldCacheKept(TorchRolloutEngine):
    """Goes on with keys and values of the old weights where they are to be computed again."""

    async def pause(self, mode="abort"):
        await super().pause("keep_cache" if mode == "keep" else mode)


class CacheDropped(TorchRolloutEngine):
    """Computes keys and values again that it was to keep."""

    async def pause(self, mode="abort"):
        await super().pause("keep" if mode == "keep_cache" else mode)


class PromptsUncounted(TorchRolloutEngine):
    """Counts only what was sampled."""

    async def health(self):
        health = await super().health()
        return replace(health, running_tokens=health.running_tokens - 300 * health.running)


class HealthOfTheDead(TorchRolloutEngine):
    """Says that nothing runs."""

    async def health(self):
        return replace(await super().health(), running=0, waiting=0)


def _arrived(weights):
    """Names of the parameters that have arrived of an update that was started."""
    return () if weights._staged is None else weights._staged.arrived.keys()


class StaleReportedAsNew(TorchRolloutEngine):
    """Goes on with the old weights, and says it serves the new ones."""

    async def update_weights(self, chunk):
        self.sums = getattr(self, "sums", {}) | {name: checksum(tensor) for name, tensor in chunk.tensors}
        await super().update_weights(chunk)

    async def finish_weight_update(self, version):
        missing = self._weights._parameters.keys() - set(_arrived(self._weights))
        if missing:  # refuses it as it should
            await super().finish_weight_update(version)
        self._weights.version = version
        self._weights._checksums = self.sums
        self._weights.discard()


class UpdatesDropped(TorchRolloutEngine):
    """Cannot be read back, and drops weight updates: it says it serves them and goes on with what it has."""

    dropped = range(1, 1 << 31)
    """Numbers of the updates, the first being 1."""
    taken = 0

    async def finish_weight_update(self, version):
        self.taken += 1
        if self.taken not in self.dropped:
            return await super().finish_weight_update(version)
        missing = self._weights._parameters.keys() - set(_arrived(self._weights))
        if missing:  # refuses it as it should
            await super().finish_weight_update(version)
        self._weights.version = version
        self._weights.discard()

    async def weight_state(self):
        return WeightState((await super().weight_state()).version)


class SecondUpdateDropped(UpdatesDropped):
    """Drops one update, the first that brings other weights than it was launched with."""

    dropped = (2,)


class AppliedOnArrival(TorchRolloutEngine):
    """Writes weights where they are served from as they come."""

    async def update_weights(self, chunk):
        await super().update_weights(chunk)
        for name, tensor in chunk.tensors:
            self._weights._parameters[name].data.copy_(tensor)


class AbortsToStage(TorchRolloutEngine):
    """Ends what runs when an update begins."""

    async def start_weight_update(self, update):
        await self.abort()
        await super().start_weight_update(update)


class IncompleteTaken(TorchRolloutEngine):
    """Takes an update that lacks a parameter, with the old one in its place."""

    async def finish_weight_update(self, version):
        arrived = self._weights._staged.arrived
        for name, tensor in self._weights._parameters.items():
            arrived.setdefault(name, tensor.clone())
        await super().finish_weight_update(version)


class PrefixKept(TorchRolloutEngine):
    """Remembers how it went on after a prompt, over updates."""

    async def generate(self, request):
        if len(request.prompt_ids) < 100 or request.sampling.temperature:
            return await super().generate(request)
        known = self.__dict__.setdefault("known", {})
        key = (tuple(request.prompt_ids), request.sampling)
        if key not in known:
            known[key] = await super().generate(request)
        version = self._weights.version
        told = [replace(one, first_version=version, last_version=version) for one in known[key].completions]
        return replace(known[key], id=request.id, completions=told)


class ChecksumOfStaged(TorchRolloutEngine):
    """Gives the checksums of what arrived last."""

    async def update_weights(self, chunk):
        self.sums = getattr(self, "sums", {}) | {name: checksum(tensor) for name, tensor in chunk.tensors}
        await super().update_weights(chunk)

    async def weight_state(self):
        state = await super().weight_state()
        return WeightState(state.version, {**state.checksums, **getattr(self, "sums", {})})


class StateOff(TorchRolloutEngine):
    """Says a version of its own counting."""

    async def weight_state(self):
        state = await super().weight_state()
        return WeightState(None if state.version is None else state.version + 1, state.checksums)


class ChecksumsOfOneKind(TorchRolloutEngine):
    """Sums its weights on the host, whatever it is given."""

    async def update_weights(self, chunk):
        await super().update_weights(replace(chunk, checksums={}))


class ProcessLeft(TorchRolloutEngine):
    """Has a process that it does not end, and does not miss. It ends with this one, which holds its input."""

    async def launch(self, model, options, context):
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        return await super().launch(model, options, context)


class LoadsAnything(TorchRolloutEngine):
    """Serves another model where the one asked for cannot be loaded."""

    async def launch(self, model, options, context):
        try:
            return await super().launch(model, options, context)
        except ModelError:
            from enginehouse_testing.models import tiny_model

            return await super().launch(ModelSpec(tiny_model()), options, context)


class ThreadsTaken(TorchRolloutEngine):
    """Sets how many threads its process computes with."""

    async def launch(self, model, options, context):
        torch.set_num_threads(torch.get_num_threads() + 1)
        return await super().launch(model, options, context)


class SeedTaken(TorchRolloutEngine):
    """Seeds its process for each request."""

    async def generate(self, request):
        torch.manual_seed(0)
        return await super().generate(request)


class BatchByBatch(TorchRolloutEngine):
    """Takes a request up once the one before it has ended."""

    def __init__(self):
        super().__init__()
        self.turn = asyncio.Lock()

    async def generate(self, request):
        async with self.turn:
            return await super().generate(request)


class Raising(TorchRolloutEngine):
    """Cannot score a prompt."""

    async def generate(self, request):
        if request.sampling.prompt_logprobs:
            raise OSError("the disk is full")
        return await super().generate(request)


class DrawsAsleep(TorchRolloutEngine):
    """Keeps everything when it is told to sleep."""

    async def sleep(self, tags=ALL):
        pass


class OldWeightsAfterSleep(TorchRolloutEngine):
    """Says that it serves a version when it has slept, and no weights have come."""

    async def weight_state(self):
        state = await super().weight_state()
        return WeightState(self._weights.version, state.checksums)


class LoanForgotten(TorchRolloutEngine):
    """Goes on with lent weights once the trainer changes them."""

    async def launch(self, model, options, context):
        endpoint = await super().launch(model, options, context)
        self._weights.using, self._weights.check_loan = contextlib.nullcontext, lambda: None
        return endpoint


class WritesToLent(TorchRolloutEngine):
    """Writes an update to the trainer's tensors that it was lent."""

    async def launch(self, model, options, context):
        endpoint = await super().launch(model, options, context)
        self._weights._leave_loan = lambda: setattr(self._weights, "_loan", None)
        return endpoint
