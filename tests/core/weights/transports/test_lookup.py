"""From a transport's name to the transport."""

import pytest

from enginehouse.plugin import PluginLookupError, ResolveError
from enginehouse.weights.transports.inproc import InprocTransport
from enginehouse.weights.transports.lookup import load_transport


@pytest.mark.parametrize(
    "name",
    ["inproc", "enginehouse:inproc", "Enginehouse:inproc", "enginehouse.weights.transports.inproc:InprocTransport"],
)
def test_a_transport_has_a_name_a_distribution_and_a_class(name):
    assert isinstance(load_transport(name), InprocTransport)


def test_what_is_not_there_is_an_error_of_its_kind():
    with pytest.raises(PluginLookupError, match="inproc"):
        load_transport("enginehouse:inprock")
    with pytest.raises(ResolveError, match="nowhere"):
        load_transport("nowhere.to_be:Found")
