"""Fixtures of the `fsdp` engine's tests."""

import pytest
from fsdp_train_cases import OPTIONS, score_and_train
from rank_processes import rank_processes
from torch_train_cases import make_batch, make_engine, weights_of


@pytest.fixture(scope="module")
def run_ranks():
    """Real ranks, kept for the tests of a module."""
    families = (f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "llama"))
    with rank_processes("enginehouse_fsdp.engine", *families) as run:
        yield run


@pytest.fixture(scope="session")
def oracle():
    """`oracle(path, head)`: what `score_and_train` gives of the `torch` engine, and its weights afterwards."""
    found = {}

    def oracle(path: str, head: str):
        if (path, head) not in found:
            engine = make_engine(path, head=head, **OPTIONS)
            found[path, head] = (*score_and_train(engine, make_batch(4, 4), head), weights_of(engine))
        return found[path, head]

    return oracle
