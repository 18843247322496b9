"""Rollout engines of plugins that drop weight updates: what they load under a new version's number are older weights.

In a module of its own because worker processes import it by name, under the interpreter of the plugin's runtime.
"""

import os
from pathlib import Path
from unittest.mock import patch

from enginehouse.weights.staging import Version


class UpdatesDropped:
    """Serves what it was launched with, under any version."""

    async def finish_weight_update(self, version):
        launched = {"directory": self._weights._spec.path}
        with patch.object(Version, "source", lambda staged: launched):
            await super().finish_weight_update(version)


class SecondUpdateDropped:
    """Drops the second update."""

    taken = 0

    async def finish_weight_update(self, version):
        self.taken += 1
        if self.taken != 2:
            return await super().finish_weight_update(version)
        served = self._weights.served.source()
        with patch.object(Version, "source", lambda staged: served):
            await super().finish_weight_update(version)


class AdapterNotNamed:
    """Serves the model without its adapter, as to a request that does not name it."""

    async def finish_weight_update(self, version):
        await super().finish_weight_update(version)
        self._adapter = None


class AdaptersCachedByName:
    """Finds keys and values of older versions, because the adapter's name is always the same."""

    async def finish_weight_update(self, version):
        self._weights.keeps_cache = True
        await super().finish_weight_update(version)

    async def _run(self, *args):
        import vllm.inputs

        salted = vllm.inputs.tokens_input
        with patch("vllm.inputs.tokens_input", lambda prompt, cache_salt: salted(prompt, cache_salt="0")):
            return await super()._run(*args)


STALE_ADAPTERS = ("not named", "cached by name", "not told")
"""The ways of `StaleAdapter`: requests do not name the adapter; they find keys and values of older versions, because
its name is always the same; or the replica loads the served adapter again."""


class StaleAdapter:
    """Serves an older adapter in SGLang, in the way that the file at `STALE_ADAPTER` of the environment says."""

    way = staticmethod(lambda: Path(os.environ["STALE_ADAPTER"]).read_text())

    async def finish_weight_update(self, version):
        if self.way() != "not told" or self._weights.served is None:
            self._weights.keeps_cache = self.way() == "cached by name"
            return await super().finish_weight_update(version)
        served = self._weights.served.source()
        with patch.object(Version, "source", lambda staged: served):
            await super().finish_weight_update(version)


def vllm_adapter_not_named():
    from enginehouse_vllm.engine import VLLMRollout

    return type("NotNamed", (AdapterNotNamed, VLLMRollout), {})()


def vllm_adapters_cached_by_name():
    from enginehouse_vllm.engine import VLLMRollout

    return type("CachedByName", (AdaptersCachedByName, VLLMRollout), {})()


def vllm_dropping():
    from enginehouse_vllm.engine import VLLMRollout

    return type("Dropping", (UpdatesDropped, VLLMRollout), {})()


def vllm_dropping_second():
    from enginehouse_vllm.engine import VLLMRollout

    return type("Dropping", (SecondUpdateDropped, VLLMRollout), {})()


def sglang_dropping():
    from enginehouse_sglang.engine import SGLangRollout

    return type("Dropping", (UpdatesDropped, SGLangRollout), {})()


def sglang_dropping_second():
    from enginehouse_sglang.engine import SGLangRollout

    return type("Dropping", (SecondUpdateDropped, SGLangRollout), {})()


def sglang_stale_adapter():
    from enginehouse_sglang.completions import PendingCompletion
    from enginehouse_sglang.engine import SGLangRollout

    build_row = PendingCompletion.build_row
    changes = {"not named": {"lora_path": None}, "cached by name": {"extra_key": "enginehouse"}}

    def build_other_row(*args):
        return build_row(*args) | changes.get(StaleAdapter.way(), {})

    patch.object(PendingCompletion, "build_row", build_other_row).start()
    return type("Stale", (StaleAdapter, SGLangRollout), {})()
