"""A vLLM replica whose layers are quantized serves each update, quantized anew. Oracle: `quantized_reference`."""

import os

import pytest
import torch
from quantized_reference import half_logprobs, quantized
from safetensors.torch import load_file
from vllm_weights_replica import updated_replica

from enginehouse_testing.models import tiny_model
from enginehouse_vllm.quantized import is_rounded

IDS = [5, 6, 7, 8, 9, 10, 11, 12] * 6
DOWN = "model.layers.1.mlp.down_proj"
NEAR, FAR = 0.4, 1.2
"""Mean differences of logprobs in nats: activations that are rounded to 8 bits are apart by 0.2 after a rounding error
of bfloat16, other weights by 2 and more."""


FAULTS = {
    1: ("not quantized anew", "no scales", "other scales", "the scale of a channel"),
    2: ("other scales", "the scale of a channel"),  # the first also leaves out a collective, so the ranks would wait
}
"""Faults of one process, by the number of processes."""


def model(seed):
    return tiny_model(hidden=128, seed=seed)


def apart(logprobs, expected):
    return float((torch.tensor(list(logprobs)) - expected).abs().mean())


def made(weights):
    codes, scales = quantized(weights)
    return codes.t(), scales


def test_quantized_weights_are_compared_with_what_they_were_made_from():
    weights = torch.randn(5000, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights[1:3], weights[4, 5] = 1e-3 * weights[1:3], 1e-6
    codes, scales = made(weights)
    assert is_rounded(codes, scales, weights)
    assert is_rounded(codes[:9], scales, weights[:, :9], True), "some of the inputs"
    assert not is_rounded(codes[:9], scales, weights[:, 9:18], True)
    assert not is_rounded(codes, torch.ones_like(scales), weights), "no scales"
    assert not is_rounded(weights.t().to(torch.float8_e4m3fn), torch.ones_like(scales), weights), "never scaled"
    assert not is_rounded(codes, scales.roll(1, 0), weights), "other scales"
    assert not is_rounded(codes.roll(1, 1), scales, weights), "other rows"
    assert not is_rounded(codes, scales, torch.full_like(weights, torch.nan))
    changed = codes.clone()
    changed.view(torch.uint8)[3, 4999] ^= 128
    assert not is_rounded(changed, scales, weights), "the sign of one number, in the last rows"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_update_is_served_quantized_anew_and_a_layer_that_was_not_fails_it(ray_cluster, runtime, tmp_path, ranks):
    fault = tmp_path / "fault"
    fault.write_text("")
    path = os.pathsep.join([runtime.env["PYTHONPATH"], os.path.dirname(os.path.dirname(__file__))])
    env = {"WEIGHT_FAULT": str(fault), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "PYTHONPATH": path}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}
    by_hand = {seed: half_logprobs(model(seed), IDS, True) for seed in (0, 1)}

    with updated_replica(runtime, model(0), "bfloat16", env=env, quantization="fp8", tensor_parallel=ranks) as act:

        def scored():
            return list(act("score", IDS).prompt_logprobs[1:])

        act("install_faults", "install_for_quantized")
        first = scored()
        assert apart(first, by_hand[0]) < NEAR
        state = act("update", model(1), 1, "bfloat16")
        assert {name for name in state.unread if "_proj" not in name} <= {"model.embed_tokens.weight"}
        assert not any("_proj" in name for name in state.checksums)
        second = scored()
        assert apart(second, by_hand[1]) < NEAR
        assert apart(second, by_hand[0]) > FAR
        if ranks == 1:
            act("save_layer", DOWN, str(tmp_path / "layer.pt"))
            held = torch.load(tmp_path / "layer.pt")
            codes, scales = quantized(load_file(f"{model(1)}/model.safetensors")[f"{DOWN}.weight"].bfloat16())
            assert torch.equal(held["weight"].t().float(), codes.float())
            assert torch.equal(held["weight_scale"], scales)
        for version, what in enumerate(FAULTS[ranks], start=2):
            fault.write_text(what)
            kind, message, parameters = act("attempt", model(0), version, "bfloat16")
            assert kind == "WeightSyncError", what
            assert "quantized" in message or "quantize" in message
            assert "version 1 is served again" in message
            assert len(parameters) == 1
            assert scored() == second
        assert act("update", model(0), 9, "bfloat16").version == 9
        assert scored() == first
