"""A model with adapters as `peft` alone trains it, in one process and row by row: the oracle of engines' adapters."""

from typing import Any

import torch
from torch_train_cases import make_batch, oracle_outputs, oracle_policy_loss, plain_model

from enginehouse.engines.model import ModelSpec
from enginehouse_torch.modeling.loading import load_model

OPTIONS: dict[str, Any] = {"lr": 5e-3, "eps": 1e-6, "weight_decay": 0.01, "tokens_per_microbatch": 40}
"""What every engine of a comparison is given, the oracle included."""
STEPS = 5


def adapted_by_peft(path, adapter, head="causal_lm", trainable=True):
    """The model with an exported adapter, as `peft` alone loads it."""
    from peft import PeftModel

    base = plain_model(path) if head == "causal_lm" else load_model(ModelSpec(path=path, head=head), "cpu")
    model = PeftModel.from_pretrained(base, adapter, is_trainable=trainable)
    if head == "value":
        base.score.requires_grad_(trainable)
    return model


def column_by_peft(model, head, batch):
    """Logprobs or values of all of a batch's tokens, each row by itself, differentiably."""
    base = model.get_base_model()
    found = []
    for row in range(len(batch)):
        ids = batch.row(row)["input_ids"]
        if head == "causal_lm":
            found.append(oracle_outputs(base, ids, 0.7)[0])
        else:
            hidden = base.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
            found.append(torch.cat([torch.zeros(1), base.score(hidden)[:, 0]]))
    return torch.cat(found)


def trained_by_peft(path, adapter, head):
    """Gradient norms of the steps; after them the adapters, by their names in a file, and the merged weights."""
    from peft import get_peft_model_state_dict

    batch = make_batch(4, 4)
    model = adapted_by_peft(path, adapter, head)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=OPTIONS["lr"], eps=OPTIONS["eps"], weight_decay=OPTIONS["weight_decay"])
    mask = batch.ragged("loss_mask").values
    norms = []
    for _ in range(STEPS):
        if head == "causal_lm":
            loss = oracle_policy_loss(model.get_base_model(), batch)
        else:
            wrong = column_by_peft(model, head, batch) - batch.ragged("returns").values
            loss = (wrong[mask] ** 2).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        adamw.step()
        adamw.zero_grad()
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    adapters = {name: matrix.clone() for name, matrix in state.items()}
    return norms, adapters, dict(model.merge_and_unload().state_dict())


def compare_with_peft(adapter, expected_adapter, first, last, base, expected, targets):
    """Check an adapter and the merged weights against those of `trained_by_peft`; no other weight may have changed."""
    assert adapter.keys() == expected_adapter.keys()
    for name, matrix in adapter.items():
        torch.testing.assert_close(matrix, expected_adapter[name], atol=1e-4, rtol=0)
    for name, weight in last.items():
        assert torch.equal(first[name], base[name]), "adapters that begin at zero changed a weight"
        torch.testing.assert_close(weight, expected[name], atol=1e-4, rtol=0)
        changed = name.removesuffix(".weight").endswith((*targets, "score"))
        assert torch.equal(weight, base[name]) != changed, name
        if changed:
            assert (weight - base[name]).abs().max() > 1e-3, "nothing was learned: there is nothing to compare"
