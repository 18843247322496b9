"""Packed rows and trees score and train like padded ones, and nothing of the square of their tokens is made.

The kernels are a GPU's. In their place stands what is told the same and computes it plainly: `rows_apart` takes what
transformers hands to flash-attention, `blocks` takes a block mask and believes its blocks as the kernel does.
"""

import inspect
import sys
import tracemalloc
import types
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from packed_attention import stand_ins, varlen
from torch.nn.functional import scaled_dot_product_attention
from torch_train_cases import POLICY, batch_of, make_batch, make_engine
from transformers import AttentionInterface

from enginehouse.engines.model import ModelSpec
from enginehouse.engines.train import Outputs
from enginehouse.errors import ConfigError
from enginehouse_testing.models import VOCABULARY_SIZE, tiny_model
from enginehouse_torch.modeling import attention
from enginehouse_torch.modeling.attention import AttentionChoices, choose_attention, model_input, row_ends
from enginehouse_torch.modeling.loading import load_model
from enginehouse_torch.modeling.packing import BatchRows, Tree, lay_out
from enginehouse_torch.modeling.sharing import _probe, try_attention

OUTPUTS = Outputs(entropy=True, temperature=0.7)


@pytest.fixture(autouse=True)
def known():
    with stand_ins():
        yield


def _engine(path, chosen, **options):
    with mock.patch("enginehouse_torch.modeling.sharing.choose_attention", return_value=chosen):
        return make_engine(path, **options)


def _trained(engine, batch):
    scores = engine.forward(batch, OUTPUTS)
    metrics = engine.forward_backward(batch, POLICY)
    return scores, metrics, {name: parameter.grad for name, parameter in engine._model.named_parameters()}


@pytest.mark.parametrize("share_prompts", ["auto", "never"])
@pytest.mark.parametrize(
    "chosen",
    [AttentionChoices("rows_apart", "blocks"), AttentionChoices(None, "blocks"), AttentionChoices("rows_apart", None)],
    ids=str,
)
@pytest.mark.parametrize(("family", "budget"), [("qwen3", 10_000), ("llama", 80)])
def test_packed_rows_and_trees_score_and_train_like_padded_ones(family, budget, chosen, share_prompts):
    path, batch = tiny_model(family), make_batch(6, 4, longest=20)
    options = {"share_prompts": share_prompts, "tokens_per_microbatch": budget}
    engine = _engine(path, chosen, **options)
    scores, metrics, gradients = _trained(engine, batch)
    right, right_metrics, right_gradients = _trained(make_engine(path, attention="sdpa", **options), batch)
    parts = [part.layout for part in engine._token_model.microbatches(batch)]
    assert all((part.packed is not None) == chosen.packs(share_prompts == "auto") for part in parts)
    assert any(part.branch is not None for part in parts) == (share_prompts == "auto")
    assert all(part.blocks(4)[1].any() for part in parts if part.packed is not None), "no block is whole"
    for name in right.columns:
        torch.testing.assert_close(scores[name].values, right[name].values, atol=1e-5, rtol=0)
    assert metrics["loss"].value == pytest.approx(right_metrics["loss"].value, abs=1e-5)
    counted = metrics["loss"].weight
    for name, gradient in right_gradients.items():
        torch.testing.assert_close(gradients[name] / counted, gradient / counted, atol=1e-5, rtol=1e-4)


def test_packed_rows_fill_a_pass_without_padding():
    rows = [[4] * tokens for tokens in (31, 6, 6)]  # of each all but the last token is an input
    batch = batch_of(rows, [[True] * len(row) for row in rows])
    (part,) = _engine(tiny_model(), AttentionChoices("rows_apart"), tokens_per_microbatch=40)._token_model.microbatches(
        batch
    )
    assert part.layout.tokens.shape == (1, 40)


def test_values_are_those_of_padded_rows():
    path, batch = tiny_model(), make_batch(3, 3).select(["input_ids", "loss_mask"])
    outputs = Outputs(logprobs=False, values=True)
    engine = _engine(path, AttentionChoices("rows_apart", "blocks"), head="value")
    oracle = make_engine(path, head="value")
    for one in (engine, oracle):
        torch.nn.init.normal_(one._model.score.weight, generator=torch.Generator().manual_seed(0))
    found, right = (one.forward(batch, outputs)["values"].values for one in (engine, oracle))
    assert right.abs().max() > 0.1
    torch.testing.assert_close(found, right, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_torchs_flex_attention_scores_and_trains_on_trees_like_a_dense_mask():
    """torch's own, not compiled; it takes no gradients on a CPU, for want of a kernel that this does not use."""
    path, batch = tiny_model(), make_batch(6, 4)
    right, _, right_gradients = _trained(make_engine(path), batch)
    with (
        mock.patch("torch.nn.attention.flex_attention._validate_device"),
        torch.compiler.set_stance("force_eager"),
        pytest.warns(UserWarning, match="without torch.compile"),
    ):
        scores, _, gradients = _trained(make_engine(path, attention="flex_attention"), batch)
    for name in right.columns:
        torch.testing.assert_close(scores[name].values, right[name].values, atol=1e-5, rtol=0)
    counted = float(batch["loss_mask"].values.sum())
    for name, gradient in right_gradients.items():
        torch.testing.assert_close(gradients[name] / counted, gradient / counted, atol=1e-5, rtol=1e-4)


def test_flash_attention_is_called_by_transformers_as_it_is_called_here(monkeypatch):
    """transformers' own way to the package, with a package that has but one function."""
    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        assert causal
        assert (dropout_p, window_size, softcap) == (0.0, (-1, -1), 0.0)
        assert cu_seqlens_q is cu_seqlens_k
        assert max_seqlen_q == max_seqlen_k
        calls.append(len(cu_seqlens_q) - 1)
        return varlen(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)

    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func
    package.flash_attn_func = package.flash_attn_with_kvcache = mock.Mock()
    padding = types.ModuleType("flash_attn.bert_padding")
    padding.pad_input = padding.unpad_input = mock.Mock()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr("transformers.modeling_flash_attention_utils.is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr("transformers.modeling_flash_attention_utils._loaded_implementation", None)
    model = load_model(ModelSpec(path=tiny_model()), "cpu")
    batch = make_batch(3, 2)
    rows = BatchRows.from_offsets(batch.ragged("input_ids").offsets.numpy(), None)
    trees = [Tree((row,), 0, end) for row, end in enumerate(rows.ends.tolist())]
    ids = batch.ragged("input_ids").values.numpy()

    def logprobs(packed):
        given = model_input(lay_out(rows, trees, packed), ids, model.device, AttentionChoices("flash_attention_2"))
        return attention.packed_token_outputs(model, given, Outputs())["logprobs"]

    right = logprobs(packed=False)
    # Not by `set_attn_implementation`, which wants the model on a GPU.
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    torch.testing.assert_close(logprobs(packed=True), right, atol=1e-5, rtol=0)
    assert calls == [len(trees)] * model.config.num_hidden_layers


@pytest.mark.parametrize("older", [False, True])
def test_torchs_own_flash_attention_is_called_with_where_rows_end(monkeypatch, older):
    """Its kernel is a GPU's; what it is told is checked against torch's own function's arguments."""

    arguments = inspect.signature(torch.nn.attention.varlen.varlen_attn)
    if older:  # before torch 2.12 grouped heads needed no word
        parameters = [each for each in arguments.parameters.values() if each.name != "enable_gqa"]
        arguments = arguments.replace(parameters=parameters)

    def varlen_attn(*given, **named):
        told = arguments.bind(*given, **named).arguments
        assert told["window_size"] == (-1, 0), "causal"
        assert told.get("enable_gqa", "enable_gqa" not in arguments.parameters)
        assert told["cu_seq_q"] is told["cu_seq_k"]
        assert told["max_q"] == told["max_k"]
        states = (told[name] for name in ("query", "key", "value"))
        return varlen(*states, told["cu_seq_q"], told["max_q"], told["scale"])

    varlen_attn.__signature__ = arguments
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    path, batch = tiny_model(), make_batch(6, 4, longest=20)
    chosen = AttentionChoices("varlen_attention")
    engine = _engine(path, chosen, share_prompts="never")
    assert engine._token_model._attention == chosen, "the kernel was not called as it wants to be"
    found, _, gradients = _trained(engine, batch)
    right, _, right_gradients = _trained(make_engine(path, attention="sdpa", share_prompts="never"), batch)
    torch.testing.assert_close(found["logprobs"].values, right["logprobs"].values, atol=1e-5, rtol=0)
    for name, gradient in right_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-3, rtol=1e-4)


def test_no_element_is_made_for_each_pair_of_tokens():
    prompt, response, rows = 2000, 400, 5
    length = prompt + response + 1
    read = BatchRows.from_offsets(np.arange(rows + 1) * length, np.tile(np.arange(length) > prompt, rows))
    layout = lay_out(read, [Tree(tuple(range(rows)), prompt, prompt + rows * response)], packed=True)
    ids = np.zeros(rows * length, dtype=np.int64)
    pairs = layout.tokens.size**2
    made = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            made.extend(one.numel() for one in torch.utils._pytree.tree_leaves(found) if isinstance(one, torch.Tensor))
            return found

    tracemalloc.start()
    with mock.patch.object(attention, "BLOCK", 128), Watching():
        given = model_input(layout, ids, torch.device("cpu"), AttentionChoices(None, "blocks"))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert given.allowed.kv_indices.shape == (1, 1, 32, 32)  # 4,000 tokens
    assert max(made) == layout.tokens.size
    assert most < pairs / 8


def test_rows_are_told_apart_by_where_they_begin_and_end():
    told = row_ends(np.array([3, 1, 4]), torch.device("cpu"))
    assert told["cu_seq_lens_q"].tolist() == told["cu_seq_lens_k"].tolist() == [0, 3, 4, 8]
    assert told["max_length_q"] == told["max_length_k"] == 4


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "installed", "capability", "chosen"),
    [
        ("auto", "cpu", "bfloat16", {2, 3}, 9, AttentionChoices()),
        ("auto", "cuda", "bfloat16", {2, 3}, 9, AttentionChoices("flash_attention_3", "flex_attention")),
        ("auto", "cuda", "bfloat16", {2, 3}, 8, AttentionChoices("flash_attention_2", "flex_attention")),
        ("auto", "cuda", "bfloat16", {3}, 10, AttentionChoices("varlen_attention", "flex_attention")),
        ("auto", "cuda", "float32", {2, 3}, 9, AttentionChoices(None, "flex_attention")),
        ("auto", "cuda", "bfloat16", set(), 9, AttentionChoices("varlen_attention", "flex_attention")),
        ("auto", "cuda", "bfloat16", set(), 7, AttentionChoices(None, "flex_attention")),
        ("sdpa", "cuda", "bfloat16", {2}, 9, AttentionChoices()),
        ("flex_attention", "cuda", "bfloat16", {2}, 9, AttentionChoices(None, "flex_attention")),
        ("flash_attention_2", "cuda", "bfloat16", {2}, 9, AttentionChoices("flash_attention_2", "flex_attention")),
    ],
)
def test_the_device_the_dtype_and_what_is_installed_choose(
    monkeypatch, wanted, device, dtype, installed, capability, chosen
):
    for version in (2, 3):
        monkeypatch.setattr(f"transformers.utils.is_flash_attn_{version}_available", lambda v=version: v in installed)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (capability, 0))
    assert choose_attention(wanted, torch.device(device), getattr(torch, dtype)) == chosen


def _mixing(module, query, key, value, attention_mask, **given):
    """Attention that knows nothing of rows."""
    found = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return found.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("what", ["rows", "trees"])
@pytest.mark.parametrize("long", [3, attention.BLOCK])
def test_what_is_tried_tells_right_from_wrong_however_long(what, long):
    model = load_model(ModelSpec(path=tiny_model(max_positions=256)), "cpu")
    difference, mistake = _probe(model, VOCABULARY_SIZE, AttentionChoices("rows_apart", "blocks"), what, long)
    assert difference < 1e-4
    assert mistake > 0.2


def test_a_kernel_that_mixes_rows_up_is_found_out_and_left_out(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "rows_apart", _mixing)
    model = load_model(ModelSpec(path=tiny_model()), "cpu")
    cpu = torch.device("cpu")
    with mock.patch(
        "enginehouse_torch.modeling.sharing.choose_attention", return_value=AttentionChoices("rows_apart", "blocks")
    ):
        assert try_attention(model, "auto", True, cpu, torch.float32) == (AttentionChoices(None, "blocks"), True)
        with pytest.raises(ConfigError, match="has other results with rows_apart than with sdpa"):
            try_attention(model, "flash_attention_2", True, cpu, torch.float32)
    with mock.patch(
        "enginehouse_torch.modeling.sharing.choose_attention", return_value=AttentionChoices(None, "absent")
    ):
        assert try_attention(model, "auto", True, cpu, torch.float32) == (AttentionChoices(), True)
    assert model.config._attn_implementation == "sdpa"
