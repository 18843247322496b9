"""Plans that bring parameters from one layout to another, carried out on plain tensors: exact, and nothing sent twice.

What a rank holds is cut here by `torch.chunk`, axis after axis, and by no code of the plan's.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.engines.weights import DTYPE_BYTES, ParamMeta, WeightSyncError
from enginehouse.weights.parts import parts_of, shape_of
from enginehouse_transports.resharding import index_within, plan_reshard

MOST_RANKS = 16


def local_part(whole: torch.Tensor, meta: ParamMeta, rank: int) -> torch.Tensor | None:
    """What a rank holds of a tensor; None: nothing, it is no owner."""
    if not meta.owners:
        return whole
    if rank not in meta.owners:
        return None
    mesh = torch.arange(len(meta.owners)).view(meta.mesh_shape or (-1, 1))
    place = (mesh == meta.owners.index(rank)).nonzero()[0].tolist()
    for at, size, placement in zip(place, meta.mesh_shape, meta.placements):
        if placement != "R":
            dimension = int(placement[1:])
            chunks = whole.chunk(size, dimension)
            whole = chunks[at] if at < len(chunks) else whole.narrow(dimension, 0, 0)
    return whole


def carried_out(moves, sources, targets, wholes, target_ranks):
    """What each target rank holds once the moves were made: the values, and how often each element came."""
    held = [{} for _ in range(target_ranks)]
    for rank, parts in enumerate(held):
        for meta, _ in parts_of(targets, rank):
            shape = local_part(wholes[meta.name], meta, rank).shape
            parts[meta.name] = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for move in moves:
        source, target = sources[move.parameter], targets[move.parameter]
        if not math.prod(source.shape):
            assert move.nbytes == 0
            continue
        of_source, of_target = dict(parts_of([source], move.source)), dict(parts_of([target], move.target))
        sent = local_part(wholes[source.name], source, move.source)[index_within(move.region, of_source[source])]
        assert sent.shape == shape_of(move.region)
        assert sent.numel() * DTYPE_BYTES[source.dtype] == move.nbytes > 0
        values, counts = held[move.target][source.name]
        values[index_within(move.region, of_target[target])] = sent
        counts[index_within(move.region, of_target[target])] += 1
    return held


def moves_of(plan, target_ranks):
    """All moves by number; each number is given once."""
    listed = [item for rank in range(target_ranks) for item in plan.moves_to(rank).items()]
    assert sorted(number for number, _ in listed) == list(range(len(plan)))
    return dict(sorted(listed))


def assert_exact(sources, targets, source_ranks, target_ranks):
    plan = plan_reshard(sources, targets, source_ranks, target_ranks)
    wholes = {}
    for meta in sources:
        wholes[meta.name] = torch.arange(math.prod(meta.shape)).view(meta.shape)
    moves = moves_of(plan, target_ranks)
    assert moves == {n: move for rank in range(source_ranks) for n, move in plan.moves_from(rank).items()}
    held = carried_out(moves.values(), sources, targets, wholes, target_ranks)
    needed = 0
    for rank, parts in enumerate(held):
        for meta in targets:
            expected = local_part(wholes[meta.name], meta, rank)
            assert (expected is None) == (meta.name not in parts)
            if expected is not None:
                values, counts = parts[meta.name]
                assert torch.equal(values, expected)
                assert (counts == 1).all()
                needed += expected.numel() * DTYPE_BYTES[meta.dtype]
    assert plan.bytes_minimum == needed
    assert plan.bytes_moved == sum(plan.bytes_sent.values()) == sum(move.nbytes for move in moves.values())
    assert plan.bytes_moved <= 1.05 * needed
    return plan


@st.composite
def layouts(draw, shape: tuple[int, ...], ranks: int):
    """How a parameter of some shape may lie on ranks: owners, mesh, placements."""
    if draw(st.integers(0, 5)) == 0:
        return {}
    mesh: tuple[int, ...] = ()
    while len(mesh) < 3 and draw(st.booleans()):
        mesh += (draw(st.integers(1, ranks // math.prod(mesh))),)
    count = math.prod(mesh) if mesh else draw(st.integers(1, ranks))
    owners = tuple(draw(st.permutations(range(ranks)))[:count])
    choices = ["R", *(f"S{dimension}" for dimension in range(len(shape)))]
    placements = tuple(draw(st.sampled_from(choices)) for _ in mesh)
    return {"owners": owners, "mesh_shape": mesh, "placements": placements}


@st.composite
def both_sides(draw):
    ranks = draw(st.integers(1, MOST_RANKS)), draw(st.integers(1, MOST_RANKS))
    sources, targets = [], []
    for number in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        meta = ParamMeta(f"p{number}", draw(st.sampled_from(sorted(DTYPE_BYTES))), shape)
        sources.append(replace(meta, **draw(layouts(shape, ranks[0]))))
        targets.append(replace(meta, **draw(layouts(shape, ranks[1]))))
    return sources, targets, *ranks


@pytest.mark.slow
@given(both_sides())
@settings(max_examples=400, deadline=None)
def test_each_target_gets_its_part_of_any_layout_exactly_and_no_element_twice(sides):
    assert_exact(*sides)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=12), st.integers(1, 16),
       st.integers(1, 16))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_ranks_that_hold_the_same_share_what_is_sent(shapes, replicas, receivers):
    sources = [ParamMeta(f"p{n}", "float32", shape, tuple(range(replicas))) for n, shape in enumerate(shapes)]
    plan = plan_reshard(sources, [replace(one, owners=()) for one in sources], replicas, receivers)
    sent = [plan.bytes_sent.get(rank, 0) for rank in range(replicas)]
    assert max(sent) - min(sent) <= max(move.nbytes for move in moves_of(plan, receivers).values())


def megatron_like(tensor, pipeline, data, layers=4):
    """A few layers as Megatron holds them: stages one after another, in each all data-parallel groups, in these tp."""
    found = []
    for layer in range(layers):
        stage, width = layer * pipeline // layers, tensor * data
        owners = tuple(range(stage * width, (stage + 1) * width))
        for name, shape, split in (("q", (12, 8), "S0"), ("o", (8, 12), "S1"), ("norm", (8,), "R")):
            found.append(ParamMeta(f"{layer}.{name}", "bfloat16", shape, owners, (data, tensor), ("R", split)))
    return found


@pytest.mark.parametrize("layout", [(2, 2, 1), (2, 2, 2), (4, 2, 2), (1, 4, 1), (3, 1, 4)])
@pytest.mark.parametrize("rollout", [(1, 1), (1, 2), (2, 2), (4, 1), (5, 3)])
def test_tensor_pipeline_and_data_parallel_training_reaches_tensor_and_data_parallel_rollout(layout, rollout):
    tensor, replicas = rollout
    targets = [
        replace(meta, owners=tuple(range(tensor * replicas)), mesh_shape=(replicas, tensor))
        for meta in megatron_like(*layout)
    ]
    plan = assert_exact(megatron_like(*layout), targets, math.prod(layout), tensor * replicas)
    if rollout == (1, 2):
        assert len(plan.bytes_sent) == math.prod(layout), "every training rank takes part"


def test_a_target_of_the_same_split_gets_its_part_from_one_rank_alone():
    held = [ParamMeta("p", "float32", (10, 4), (0, 1, 2), (3,), ("S0",))]
    plan = plan_reshard(held, held, 3, 3)
    assert [(move.source, move.target) for move in moves_of(plan, 3).values()] == [(0, 0), (1, 1), (2, 2)]


def test_a_plan_says_in_words_what_it_moves():
    held = [ParamMeta("p", "float32", (1 << 18,), (0, 1), (2,), ("S0",))]
    wanted = [ParamMeta("p", "float32", (1 << 18,))]
    said = str(plan_reshard(held, wanted, 2, 3))
    assert said == "6 moves from 2 ranks, 3.0 MiB (at least 3.0 MiB), 1.5 MiB of them from one rank"


P = ParamMeta("p", "float32", (4, 4), (0, 1), (2,), ("S0",))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"owners": (0, 2)}, "must be distinct ranks below 2"),
        ({"owners": (1, 1)}, "must be distinct ranks below 2"),
        ({"mesh_shape": (3,)}, "must have 3 owners, not 2"),
        ({"owners": ()}, "must have 2 owners, not 0"),
        ({"placements": ("S2",)}, "do not fit"),
        ({"placements": ()}, "do not fit"),
        ({"placements": ("P",)}, "do not fit"),
    ],
)
def test_metadata_that_contradict_themselves_are_refused_with_the_parameters_name(bad, said):
    with pytest.raises(WeightSyncError, match=f"'p' contradict themselves: .*{said}") as caught:
        plan_reshard([replace(P, **bad)], [P], 2, 2)
    assert caught.value.parameters == ("p",)


def test_two_sides_with_other_parameters_are_refused():
    with pytest.raises(WeightSyncError, match="the senders have 1 and the receivers 0"):
        plan_reshard([P], [], 2, 2)
    for other in (replace(P, name="q"), replace(P, shape=(4, 5)), replace(P, dtype="float16")):
        with pytest.raises(WeightSyncError, match="parameter 0 is 'p'"):
            plan_reshard([P], [other], 2, 2)
