"""The parts of the torch rollout engine on their own: random numbers, drawing, and the cache's one operation."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse_torch.cache import KVCache
from enginehouse_torch.sampling import LARGEST_UNIFORM, draw, prompt_logprobs, streams, uniforms


def numbers(seed: int, sample: int, count: int) -> np.ndarray:
    stream = streams(np.array([seed], np.uint64), np.array([sample], np.uint64))
    return uniforms(stream.repeat(count), np.arange(count))


def test_the_numbers_of_a_stream_are_uniform_and_independent():
    drawn = numbers(7, 3, 100_000)
    counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 4 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(len(drawn))


def test_neighbouring_seeds_and_samples_have_unrelated_numbers():
    firsts = np.array([[numbers(seed, sample, 1)[0] for sample in range(60)] for seed in range(60)])
    assert len(np.unique(firsts)) == firsts.size
    for along in (firsts[:-1].ravel(), firsts[1:].ravel()), (firsts[:, :-1].ravel(), firsts[:, 1:].ravel()):
        assert abs(np.corrcoef(*along)[0, 1]) < 4 / np.sqrt(along[0].size)


def test_numbers_stay_below_one_in_float32():
    assert np.float32(LARGEST_UNIFORM) < 1
    assert numbers(0, 0, 1000).dtype == np.float32


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 400), st.sampled_from([0.0, LARGEST_UNIFORM, 0.3]), st.data())
def test_a_draw_never_leaves_what_top_k_and_top_p_keep(seed, vocabulary, uniform, data):
    logits = 8 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed))
    top_k = data.draw(st.integers(1, vocabulary))
    top_p = data.draw(st.floats(0.01, 1.0))
    tokens, logprobs = draw(
        logits, torch.full((3,), uniform), None, torch.full((3,), top_k), torch.full((3,), top_p, dtype=torch.float32)
    )
    probabilities = torch.softmax(logits, -1)
    for row, token in enumerate(tokens.tolist()):
        rank = int((probabilities[row] > probabilities[row, token]).sum())
        likelier = probabilities[row][probabilities[row] > probabilities[row, token]].sum()
        kept = probabilities[row].sort(descending=True).values[:top_k].sum()
        assert rank < top_k
        assert likelier <= top_p * kept + 1e-5
    expected = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((2, 5), -torch.inf)
    logits[:, 2] = 0.0
    for uniform in (0.0, 0.5, LARGEST_UNIFORM):
        assert draw(logits, torch.full((2,), uniform))[0].tolist() == [2, 2]


def test_logprobs_are_right_to_rounding_over_a_vocabulary_of_a_real_model():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(16, 49_152, generator=generator)
    logits[::2, 7] = 17.0  # a confident model: the others' probabilities are a long sum of small terms
    exact = torch.log_softmax(logits.double(), -1)
    tokens, logprobs = draw(logits, torch.rand(16, generator=generator))
    torch.testing.assert_close(logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], atol=2e-6, rtol=0)
    prompt = prompt_logprobs(logits[None], torch.cat((tokens[:1], tokens[:-1]))[None], torch.ones(1))[0, 1:]
    torch.testing.assert_close(prompt.double(), exact.gather(1, tokens[:, None])[:-1, 0], atol=2e-6, rtol=0)


def filled(lengths: list[int], heads: int = 2, head_dim: int = 3) -> tuple[KVCache, list[torch.Tensor]]:
    """A two-layer cache of rows of these lengths, right-aligned, and each row's keys in layer 1."""
    longest = max(lengths)
    cache = KVCache(2, longest)
    keys = torch.rand(len(lengths), heads, longest, head_dim)
    for row, length in enumerate(lengths):
        keys[row, :, : longest - length] = torch.nan  # what padding holds must not matter
    for layer in range(2):
        cache.update(keys + layer, -(keys + layer), layer)
    return cache, [keys[row, :, longest - length :] + 1 for row, length in enumerate(lengths)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.data(),
)
def test_gathered_rows_keep_their_columns_right_aligned(pieces_lengths, spare, data):
    pieces, expected = [], []
    for lengths in pieces_lengths:
        cache, keys = filled(lengths)
        rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5))
        pieces.append((cache, torch.tensor(rows), cache.used - max(lengths[row] for row in rows)))
        expected += [keys[row] for row in rows]
    gathered = KVCache.gather(pieces, spare)
    assert gathered.used == max(keys.shape[1] for keys in expected)
    assert gathered.capacity == gathered.used + spare
    for row, keys in enumerate(expected):
        layer = gathered.layers[1]
        torch.testing.assert_close(layer.keys[row, :, gathered.used - keys.shape[1] : gathered.used], keys)
        torch.testing.assert_close(layer.values[row, :, gathered.used - keys.shape[1] : gathered.used], -keys)
