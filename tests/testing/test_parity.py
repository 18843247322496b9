"""What `enginehouse parity` finds of two engines' logprobs, by hand."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.errors import EnginehouseError
from enginehouse_testing.parity import DECADES, WORST, Parity, ParityReport

PROMPT_TOKENS, DRAWN, SAMPLES = 2, 40, 3


def compared(differences: np.ndarray, versions=(1,) * SAMPLES) -> Parity:
    """Samples of which the training engine thinks differently by `differences`, `(SAMPLES, DRAWN)`."""
    length = PROMPT_TOKENS + DRAWN
    ids = Ragged.from_lengths(torch.arange(SAMPLES * length), torch.full((SAMPLES,), length))
    drawn = (torch.arange(length) >= PROMPT_TOKENS).repeat(SAMPLES)
    rollout = torch.where(drawn, -2.0, 0.0)
    train = rollout.double()
    train[drawn] += torch.from_numpy(differences.reshape(-1))
    train[~drawn] = 99.0  # what a training engine says of a prompt does not matter
    samples = Batch(
        {
            "input_ids": ids,
            "loss_mask": ids.like(drawn),
            "rollout_logprobs": ids.like(rollout),
            "first_version": torch.tensor(versions),
            "weight_version": torch.tensor(versions),
        }
    )
    return Parity.of(samples, ids.like(train))


@pytest.fixture
def differences() -> np.ndarray:
    generator = np.random.default_rng(0)
    size = (SAMPLES, DRAWN)
    return generator.choice([-1, 1], size) * 10 ** generator.uniform(-7, -1, size)


def test_the_distribution_is_that_of_the_differences(differences):
    found, absolute = compared(differences), np.sort(np.abs(differences).reshape(-1))
    assert (found.tokens, found.sequences) == (SAMPLES * DRAWN, SAMPLES)
    assert found.mean == pytest.approx(absolute.mean())
    assert found.p50 == pytest.approx((absolute[59] + absolute[60]) / 2)
    assert found.p99 == pytest.approx(absolute[117] + 0.81 * (absolute[118] - absolute[117]))
    assert found.max == pytest.approx(absolute[-1])
    assert found.kl == pytest.approx(np.mean(np.expm1(differences) - differences))
    assert found.ratio == pytest.approx(np.exp(differences).mean())
    assert found.sequence_ratio == pytest.approx(np.exp(differences.sum(1)).mean())


def test_every_token_is_in_one_decade_of_the_histogram(differences):
    differences[0, :3] = 0.0, 0.5, -20.0
    found = compared(differences)
    edges = [0.0, *(10.0**exponent for exponent in DECADES), math.inf]
    absolute = np.abs(differences)
    expected = [int(((absolute > low) & (absolute <= high)).sum()) for low, high in itertools.pairwise(edges)]
    expected[0] += int((absolute == 0).sum())
    assert list(found.histogram) == expected
    assert sum(expected) == found.tokens


def test_the_worst_tokens_are_named_where_they_stand(differences):
    differences[1, 5], differences[2, 0] = 3.0, -2.0
    found = compared(differences).worst
    assert len(found) == WORST
    length = PROMPT_TOKENS + DRAWN
    assert [(one.row, one.position, one.token) for one in found[:2]] == [
        (1, PROMPT_TOKENS + 5, length + PROMPT_TOKENS + 5),
        (2, PROMPT_TOKENS, 2 * length + PROMPT_TOKENS),
    ]
    assert (found[0].rollout, found[0].train) == pytest.approx((-2.0, 1.0))


def test_what_is_not_a_number_never_passes_and_is_null_in_the_file(differences, tmp_path):
    differences[2, 7] = math.nan
    found = compared(differences)
    assert found.worst[0].row == 2
    report = ParityReport(
        train="a",
        rollout="b",
        transport="inproc",
        model="tiny",
        dtype="float32",
        temperature=1.0,
        tolerance=math.inf,
        found=found,
        roles={"actor": [{"pid": 1}]},
    )
    assert not report.passed
    written = json.loads(report.write(tmp_path).read_text(), parse_constant=pytest.fail)
    assert written["passed"] is False
    assert written["found"]["mean"] is None
    assert written["found"]["p50"] is None
    assert written["roles"] == {"actor": [{"pid": 1}]}


@pytest.mark.parametrize(("versions", "said"), [((0, 0, 0), "version 0"), ((1, 0, 1), "version 0, version 1")], ids=str)
def test_samples_of_other_weights_are_refused(differences, versions, said):
    with pytest.raises(EnginehouseError, match=f"given weights of version 1, but returned samples of {said}"):
        compared(differences, versions)
