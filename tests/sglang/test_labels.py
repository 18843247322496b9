"""What SGLang knows a replica's weight versions by."""

import pytest

from enginehouse.errors import EnginehouseError
from enginehouse_sglang.labels import Labels


def test_a_label_gives_its_version_back():
    labels = Labels("rollout replica 0")
    assert [labels.number(labels.label(number)) for number in (0, 7)] == [0, 7]


@pytest.mark.parametrize("label", ["default", "7", "", "another-run-7"])
def test_a_label_that_was_not_given_here_is_named(label):
    with pytest.raises(EnginehouseError, match=f"rollout replica 0: .*{label!r}, which did not come from this replica"):
        Labels("rollout replica 0").number(label)


def test_two_launches_do_not_know_each_other_s_labels():
    with pytest.raises(EnginehouseError, match="did not come from this replica"):
        Labels("rollout replica 0").number(Labels("rollout replica 0").label(1))
