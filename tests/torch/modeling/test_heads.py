"""Which models' heads score by themselves, and that those that have to have their logits score right as well."""

import pytest
import torch

from enginehouse.engines.train import Outputs
from enginehouse_torch.modeling import scores
from enginehouse_torch.modeling.heads import ModelInput, token_outputs

VOCABULARY = 31
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
OUTPUTS = Outputs(entropy=True, temperature=0.7)


def made(family, **values):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **values})).eval()


def with_adapter():
    from peft import LoraConfig, inject_adapter_in_model

    model = made("qwen3", tie_word_embeddings=False)
    inject_adapter_in_model(LoraConfig(target_modules=["lm_head"], init_lora_weights=False), model)
    return model


MODELS = {
    "tied": (lambda: made("qwen3", tie_word_embeddings=True), True),
    "apart": (lambda: made("llama", tie_word_embeddings=False), True),
    "bias": (lambda: made("phi"), True),
    "caps": (lambda: made("gemma2", final_logit_softcapping=2.0), False),
    "scales": (lambda: made("cohere", logit_scale=0.25), False),
    "divides": (lambda: made("granite", logits_scaling=4.0), False),
    "adapter": (with_adapter, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_model_scores_as_by_its_logits_and_has_them_where_it_must(name, monkeypatch):
    monkeypatch.setattr(scores, "BLOCK", 40)
    make, scores_itself = MODELS[name]
    model = make()
    for part, parameter in model.named_parameters():
        if part == "lm_head.bias":
            torch.nn.init.normal_(parameter)
    ids = torch.randint(1, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    predictor = torch.tensor([0, 3, 4, 7, 12])
    targets = ids.flatten()[predictor + 1]
    log_shares = (model(input_ids=ids).logits.flatten(0, 1)[predictor].double() / 0.7).log_softmax(-1)
    wanted = {
        "logprobs": log_shares.gather(-1, targets[:, None])[:, 0],
        "entropy": -(log_shares.exp() * log_shares).sum(-1),
    }
    right = torch.autograd.grad(sum(column.sum() for column in wanted.values()), list(trained(model)))

    widths = []
    model.get_output_embeddings().register_forward_hook(lambda _, args, found: widths.append(found.shape[-1]))
    given = ModelInput(ids, None, None, predictor, targets)
    for _ in range(2):  # it is found out once
        found = token_outputs(model, given, OUTPUTS)
    assert widths[1:] == [2 if scores_itself else VOCABULARY] * 2
    for column, values in wanted.items():
        torch.testing.assert_close(found[column].double(), values, atol=1e-5, rtol=0)
    gradients = torch.autograd.grad(sum(column.sum() for column in found.values()), list(trained(model)))
    for ours, theirs in zip(gradients, right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * max(1.0, float(theirs.abs().max())), rtol=0)


def trained(model):
    return (parameter for parameter in model.parameters() if parameter.requires_grad)
