"""Bucket packing: every parameter once, in order, within the limit wherever that is possible."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transport_weights import bytes_of, random_tensor

from enginehouse.engines.weights import ALIGNMENT, DTYPE_BYTES, ParamMeta, WeightSyncError
from enginehouse.weights.buckets import drain, in_plan_order, pack_buckets, plan_transfer
from enginehouse.weights.checksums import checksum, copy_with_checksum
from enginehouse.weights.host_memory import lay_out

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


@given(parameter_lists)
def test_parameters_that_lie_side_by_side_are_aligned_and_do_not_overlap(parameters):
    offsets, size = lay_out(parameters)
    end = 0
    for parameter in parameters:
        begin = offsets[parameter.name]
        assert begin % ALIGNMENT == 0
        assert begin >= end
        end = begin + parameter.nbytes
    assert end <= size


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
        with drain(weights()) as source:
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
