"""Rollout engines of plugins that drop weight updates: what they load under a new version's number are older weights.

In a module of its own because worker processes import it by name, under the interpreter of the plugin's runtime.
"""

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
