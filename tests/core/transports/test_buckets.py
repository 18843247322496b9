"""Bucket packing: every parameter once, in order, within the limit wherever that is possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.engines.weights import (
    ALIGNMENT,
    DTYPE_BYTES,
    ParamMeta,
    WeightSyncError,
    checksum,
    copy_with_checksum,
    pack_buckets,
)
from enginehouse.transports.buckets import exhausted, in_plan_order, largest_bucket, layout, plan_transfer

from .weights import bytes_of, random_tensor

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
parameter_lists = st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPE_BYTES))), max_size=30).map(
    lambda found: [ParamMeta(f"p{i}", dtype, shape) for i, (shape, dtype) in enumerate(found)]
)


@given(parameter_lists, st.integers(1, 4096))
def test_buckets_hold_every_parameter_once_in_order_and_within_the_limit(parameters, limit):
    buckets = pack_buckets(parameters, limit)
    assert [index for bucket in buckets for index in bucket] == list(range(len(parameters)))
    for bucket in buckets:
        assert bucket
        assert len(bucket) == 1 or sum(parameters[i].aligned_nbytes for i in bucket) <= limit


@given(parameter_lists, st.integers(1, 4096))
def test_a_layout_is_aligned_without_overlap_and_fits_the_largest_bucket(parameters, limit):
    plan = plan_transfer("t", parameters, 1, "s", limit)
    for bucket in range(len(plan.buckets)):
        end = 0
        for parameter, offset in layout(plan, bucket):
            assert offset % ALIGNMENT == 0
            assert offset >= end
            end = offset + parameter.nbytes
        assert end <= plan.bucket_bytes


@pytest.mark.parametrize(
    ("given_weights", "said"),
    [
        ([], "ended before 'a'"),
        ([("b", torch.zeros(2))], "'b'"),
        ([("a", torch.zeros(3))], "shape"),
        ([("a", torch.zeros(2, dtype=torch.float16))], "float16"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(2))], "'b', which its metadata do not announce"),
    ],
)
def test_weights_that_are_not_the_planned_ones_are_refused_by_name(given_weights, said):
    plan = plan_transfer("t", [ParamMeta("a", "float32", (2,))], 1, "s", 64)
    with pytest.raises(WeightSyncError, match=said) as caught:
        list(in_plan_order(plan, iter(given_weights)))
    assert caught.value.parameters


def test_weights_are_exhausted_even_when_sending_fails():
    given_out = []

    def weights():
        for i in range(5):
            given_out.append(i)
            yield f"p{i}", torch.zeros(1)

    def fail():
        with exhausted(weights()) as source:
            next(source)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert given_out == list(range(5))


@given(
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.integers(1, 64),
    st.booleans(),
)
def test_a_copy_in_blocks_copies_every_byte_and_has_the_checksum_of_the_whole(shape, dtype, block_bytes, strided):
    source = random_tensor(shape, dtype, torch.Generator().manual_seed(0))
    source = source.movedim(0, -1) if strided and shape else source
    target = torch.zeros(source.shape, dtype=source.dtype)
    assert copy_with_checksum(source, target, block_bytes) == checksum(source)
    assert bytes_of({"": target}) == bytes_of({"": source})


@pytest.mark.parametrize(
    ("free_mib", "bucket_mib"), [(100_000, 64), (512, 64), (256, 32), (64, 8), (1, 1)], ids=lambda mib: f"{mib}M"
)
def test_buckets_are_small_where_shared_memory_is(free_mib, bucket_mib):
    assert largest_bucket(free_mib << 20) == bucket_mib << 20
