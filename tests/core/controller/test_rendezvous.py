"""Plain `torch.distributed` in workers."""

from __future__ import annotations

from controller_workers import Reducer


def test_init_process_group_works_without_arguments_in_two_groups_at_once(launch):
    first = launch(Reducer, distributed=True)
    second = launch(Reducer, distributed=True)
    assert first.sum_of_ranks() == [3, 3]
    assert second.sum_of_ranks() == [3, 3]
