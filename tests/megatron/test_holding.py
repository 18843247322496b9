"""What a checkpoint holds is in a `megatron` export again: trained, or as it was, whatever form people saved it in."""

import pytest
import torch
from checkpoint_forms import FORMS, copied, faults, rewritten, tensors_of, tied
from torch_train_cases import POLICY, make_batch

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.errors import ModelError
from enginehouse_megatron.options import MegatronOptions


def set_up(path, head="causal_lm"):
    from enginehouse_megatron.engine import MegatronEngine

    engine = MegatronEngine()
    engine.setup(ModelSpec(path=str(path), head=head), MegatronOptions(lr=1e-2), ProcessContext("actor"))
    return engine


@pytest.mark.parametrize(
    "form", ["plain", "tied", "tied_with_its_head", "one_more_layer", "prediction_head", "shards", "experts"]
)
def test_each_stored_tensor_is_trained_or_as_it_was(tmp_path, form):
    source = FORMS[form](tmp_path / "model")
    engine = set_up(source)
    engine.forward_backward(make_batch(2, 2), POLICY)
    engine.optim_step()
    engine.export_hf(str(tmp_path / "export"))
    engine.shutdown()
    trained = {name for name in tensors_of(source) if not name.startswith(("mtp", "model.layers.2"))}
    assert not faults(source, tmp_path / "export", trained)


def test_a_tied_head_that_differs_is_refused_with_the_cure(tmp_path):
    source = rewritten(
        tied(tmp_path / "model"), lambda weights: weights.update({"lm_head.weight": torch.zeros(32, 32)})
    )
    with pytest.raises(ModelError, match=r"says tie_word_embeddings.*and lm_head\.weight are one"):
        set_up(source)


def test_a_value_head_stands_in_for_the_head_alone(tmp_path):
    source = copied(tmp_path / "model", tied=False)
    engine = set_up(source, head="value")
    engine.export_hf(str(tmp_path / "export"))
    engine.shutdown()
    assert tensors_of(tmp_path / "export").keys() == {*tensors_of(source), "score.weight"} - {"lm_head.weight"}
