"""Scores by blocks of logits are a dense log-softmax's, their gradients too, and no more than a block is ever there."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed import ReduceOp
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from enginehouse.engines.train import Outputs
from enginehouse_torch.modeling import scores as scores_module
from enginehouse_torch.modeling.scores import Split, score_columns, scores
from enginehouse_torch.modeling.sizes import head_bytes

TOKENS, HIDDEN, VOCABULARY = 13, 8, 29
MEASURED = Outputs(entropy=True, temperature=0.7, entropy_gradient=False)
ENTROPY = Outputs(entropy=True, temperature=0.7)


def drawn(tokens=TOKENS, spread=1.0):
    """Hidden states, weight, bias and targets, the head's logits being normal with the standard deviation `spread`."""
    generator = torch.Generator().manual_seed(0)
    states, weight = (
        torch.randn(tokens, HIDDEN, generator=generator),
        torch.randn(VOCABULARY, HIDDEN, generator=generator),
    )
    bias = torch.randn(VOCABULARY, generator=generator)
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    return states * spread / HIDDEN**0.5, weight, bias, targets


def dense(logits, targets, outputs):
    """The same by a log-softmax of all logits, in float64."""
    log_shares = (logits.double() / outputs.temperature).log_softmax(-1)
    found = [log_shares.gather(-1, targets[:, None])[:, 0]]
    if outputs.entropy:
        found.append(-(log_shares.exp() * log_shares.clamp(min=-1e9)).sum(-1))
    return torch.stack(found, -1)


def slopes_of(found):
    return torch.randn(found.shape, generator=torch.Generator().manual_seed(1))


def gradients(found, outputs, *leaves):
    """Of a sum over what was found in which each counts differently; what is only measured has none."""
    counted = found if outputs.entropy_gradient else found[:, :1]
    return torch.autograd.grad((counted * slopes_of(counted)).sum(), leaves)


def assert_close(found, wanted):
    """To 1e-5, relative to the largest element."""
    torch.testing.assert_close(found.double(), wanted, atol=1e-5 * max([1.0, *wanted.abs().flatten().tolist()]), rtol=0)


@pytest.fixture(params=[1 << 27, 200, 7], ids=["one block", "few blocks", "rows and columns alone"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(scores_module, "BLOCK", request.param)
    monkeypatch.setitem(scores_module.SCORED_AT_ONCE, "cpu", min(request.param, 40))
    return request.param


@pytest.mark.parametrize("outputs", [Outputs(), MEASURED, ENTROPY], ids=["logprobs", "entropy measured", "entropy"])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0], ids=["ties", "usual", "peaked"])
@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
def test_values_and_gradients_are_those_of_a_dense_log_softmax(blocks, outputs, spread, tokens):
    states, weight, bias, targets = drawn(tokens, spread)
    leaves = [leaf.requires_grad_() for leaf in (states, weight, bias)]
    right_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = scores(*leaves, targets, outputs)
    assert found.dtype == torch.float32
    right = dense(torch.nn.functional.linear(*right_leaves), targets, outputs)
    assert_close(found, right)
    columns = score_columns(found, outputs)
    assert [column.requires_grad for column in columns.values()] == [True, outputs.entropy_gradient][: len(columns)]
    wanted = gradients(right, outputs, *right_leaves)
    for ours, theirs in zip(gradients(found, outputs, *leaves), wanted, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("outputs", [MEASURED, ENTROPY], ids=["entropy measured", "entropy"])
def test_masked_logits_have_no_share_and_no_gradient(blocks, outputs):
    logits = 30 * torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    logits[:, 4] = -torch.inf
    targets = torch.arange(7) % 4
    ours, theirs = logits.clone().requires_grad_(), logits.clone().double().requires_grad_()
    found, right = scores(ours, None, None, targets, outputs), dense(theirs, targets, outputs)
    assert_close(found, right)
    (gradient,), (wanted,) = gradients(found, outputs, ours), gradients(right, outputs, theirs)
    assert_close(gradient, wanted)


@pytest.mark.parametrize("frozen", [0, 1, 2], ids=["states", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(blocks, frozen):
    *leaves, targets = drawn()
    whole = [leaf.clone().requires_grad_() for leaf in leaves]
    wanted = gradients(scores(*whole, targets, ENTROPY), ENTROPY, *whole)
    for number, leaf in enumerate(leaves):
        leaf.requires_grad_(number != frozen)
    found = scores(*leaves, targets, ENTROPY)
    (found * slopes_of(found)).sum().backward()
    assert leaves[frozen].grad is None
    assert all(torch.equal(leaf.grad, right) for leaf, right in zip(leaves, wanted, strict=True) if leaf.requires_grad)


def test_a_tied_embedding_gets_the_sum_of_both_gradients(blocks):
    _, weight, _, targets = drawn()
    weight, right = weight.clone().requires_grad_(), weight.double().requires_grad_()
    ids = torch.arange(TOKENS) % 5
    found = gradients(scores(weight[ids], weight, None, targets, ENTROPY), ENTROPY, weight)
    wanted = gradients(dense(right[ids] @ right.t(), targets, ENTROPY), ENTROPY, right)
    assert_close(found[0], wanted[0])


class Ranks:
    """Ranks that are threads: what stands for `torch.distributed` while they score together."""

    def __init__(self, size):
        self.ReduceOp = ReduceOp
        self._size, self._barrier, self._sent = size, threading.Barrier(size, timeout=30), {}

    def run(self, work):
        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(work, range(self._size)))

    def all_reduce(self, tensor, op=ReduceOp.SUM, group=None):
        self._sent[threading.get_ident()] = tensor.clone()
        self._barrier.wait()
        sent = torch.stack(list(self._sent.values()))
        self._barrier.wait()
        tensor.copy_(sent.amax(0) if op == ReduceOp.MAX else sent.sum(0))


@pytest.mark.parametrize("size", [2, 5, 16])
@pytest.mark.parametrize("outputs", [Outputs(), ENTROPY], ids=["logprobs", "entropy"])
def test_ranks_that_share_the_vocabulary_score_as_one_does(blocks, monkeypatch, size, outputs):
    """Each has as many rows, the last some that stand for no token; of 16, two have none that does."""
    ranks = Ranks(size)
    monkeypatch.setattr(scores_module, "dist", SimpleNamespace(all_reduce=ranks.all_reduce, ReduceOp=ReduceOp))
    states, weight, bias, targets = drawn(spread=3.0)
    each = -(-VOCABULARY // size)
    padding = each * size - VOCABULARY
    padded = [torch.cat([rows, rows.new_full((padding, *rows.shape[1:]), 50.0)]) for rows in (weight, bias)]

    def work(rank):
        part = slice(rank * each, (rank + 1) * each)
        leaves = [leaf.clone().requires_grad_() for leaf in (states, padded[0][part], padded[1][part])]
        own = max(0, min(each, VOCABULARY - rank * each))
        found = scores(*leaves, targets, outputs, Split(rank * each, own, None))
        return found.detach(), *gradients(found, outputs, *leaves)

    found, of_states, of_weight, of_bias = zip(*ranks.run(work), strict=True)
    leaves = [leaf.double().requires_grad_() for leaf in (states, weight, bias)]
    right = dense(torch.nn.functional.linear(*leaves), targets, outputs)
    wanted = gradients(right, outputs, *leaves)
    for one, gradient in zip(found, of_states, strict=True):
        assert_close(one, right.detach())
        assert_close(gradient, wanted[0])
    for parts, of_tokens in zip((of_weight, of_bias), wanted[1:], strict=True):
        whole = torch.cat(parts).double()
        assert_close(whole[:VOCABULARY], of_tokens)
        assert not whole[VOCABULARY:].any()


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation gives, but for those of some shapes."""

    def __init__(self, *shapes):
        super().__init__()
        self.elements, self._shapes = 0, shapes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = (one for one in tree_leaves(found) if isinstance(one, torch.Tensor))
        self.elements = max(self.elements, *(t.numel() for t in tensors if t.shape not in self._shapes), 0)
        return found


def test_no_tensor_is_larger_than_a_block(blocks):
    *leaves, targets = drawn(tokens=100)
    states, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    with Largest(states.shape, weight.shape, weight.t().shape) as largest:
        scores(states, weight, bias, targets, ENTROPY).sum().backward()
    # Of a token, or a row of the vocabulary, there is always one.
    assert largest.elements <= max(blocks, 4 * len(states), VOCABULARY)


def peak_bytes(tokens, hidden, vocabulary, dtype, outputs):
    """What a forward and backward pass takes beside states, weight and targets, as on a GPU; nothing is allocated."""
    with FakeTensorMode():
        states = torch.empty(tokens, hidden, dtype=dtype, requires_grad=True)
        head = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
        targets = torch.zeros(tokens, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(states, head, targets)
        with tracker:
            scores(states, head.weight, None, targets, outputs).sum().backward()
    (peak,) = (found["Total"] for found in tracker.get_tracker_snapshot("peak").values())
    return peak - sum(t.numel() * t.element_size() for t in (states, head.weight, targets))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shapes", "dtype", "outputs", "most"),
    [
        pytest.param((16384, 3584, 152064), torch.bfloat16, MEASURED, 2.14e9, marks=pytest.mark.slow),
        ((16384, 3584, 152064), torch.bfloat16, ENTROPY, 2.14e9),  # 7B; 1.09e9 of it are the weight's gradient
        pytest.param((16384, 3584, 152064), torch.float32, ENTROPY, 3.23e9, marks=pytest.mark.slow),
        pytest.param((16384, 5120, 152064), torch.bfloat16, Outputs(), 2.8e9, marks=pytest.mark.slow),  # 32B
        ((512, 3584, 152064), torch.float32, ENTROPY, 2.95e9),  # one block
        ((4096, 64, 5000), torch.bfloat16, Outputs(), 0.25e9),  # where forward takes most
    ],
    ids=str,
)
def test_the_peak_is_what_head_bytes_says(monkeypatch, shapes, dtype, outputs, most):
    monkeypatch.setattr(scores_module, "SCORED_AT_ONCE", {})  # as on a GPU
    peak = peak_bytes(*shapes, dtype, outputs)
    said = head_bytes(*shapes, dtype.itemsize, entropy_gradient=outputs.entropy and outputs.entropy_gradient)
    assert peak == pytest.approx(said, rel=0.01)
    assert peak < most
