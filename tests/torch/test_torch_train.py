"""The torch training engine computes what a plain transformers model computes, however the batch is cut."""

import pytest
import torch
from torch_train_cases import (
    NOT_FINITE,
    PER_ROW,
    POLICY,
    SQUARED_ERROR,
    batch_of,
    make_batch,
    make_engine,
    oracle_outputs,
    oracle_policy_loss,
    plain_model,
    weights_of,
)  # fmt: skip

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import ALL, LossSpec, Mean, NonFiniteWeights, Outputs, TrainEngine
from enginehouse.errors import ConfigError, EnginehouseError, ModelError
from enginehouse.plugin import PluginLookupError
from enginehouse_testing.models import VOCABULARY_SIZE, tiny_model, with_weight
from enginehouse_torch.modeling import scores

FAMILIES = [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)]


def test_it_is_a_train_engine():
    assert isinstance(make_engine(tiny_model()), TrainEngine)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_logprobs_and_entropy_equal_a_forward_pass_of_each_row_alone(family, tied):
    path = tiny_model(family, tied)
    batch = make_batch(4, 3).select(["input_ids"])
    result = make_engine(path).forward(batch, Outputs(entropy=True, temperature=0.8))
    assert result.columns == ("logprobs", "entropy")
    model = plain_model(path)
    for row in range(len(batch)):
        with torch.no_grad():
            logprobs, entropy = oracle_outputs(model, batch.row(row)["input_ids"], 0.8)
        torch.testing.assert_close(result.row(row)["logprobs"], logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(result.row(row)["entropy"], entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("share_prompts", ["auto", "never"])
def test_with_a_loss_mask_its_tokens_are_scored_and_the_others_are_zero(share_prompts):
    path = tiny_model()
    batch = make_batch(4, 4)
    result = make_engine(path, share_prompts=share_prompts).forward(batch, Outputs())
    model = plain_model(path)
    for row in range(len(batch)):
        with torch.no_grad():
            logprobs, _ = oracle_outputs(model, batch.row(row)["input_ids"])
        wanted = torch.where(batch.row(row)["loss_mask"], logprobs, 0.0)
        torch.testing.assert_close(result.row(row)["logprobs"], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("share_prompts", ["auto", "never"])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_one_step_equals_a_plain_loop_with_adamw(family, tied, share_prompts):
    path = tiny_model(family, tied)
    batch = make_batch(4, 4)
    engine = make_engine(path, lr=1e-2, max_grad_norm=0.5, weight_decay=0.1, share_prompts=share_prompts)
    metrics = engine.forward_backward(batch, POLICY)
    stepped = engine.optim_step()

    model = plain_model(path)
    loss = oracle_policy_loss(model, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False).step()

    assert metrics["loss"].value == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["ratio"].weight == metrics["loss"].weight == batch["loss_mask"].values.sum()
    assert stepped == {"grad_norm": pytest.approx(norm.item(), rel=1e-5), "lr": 1e-2, "skipped": 0.0}
    oracle = dict(model.named_parameters())
    for name, weight in weights_of(engine).items():
        # AdamW's first step is lr * sign(gradient): where a gradient is near zero, rounding decides its sign.
        near_zero = oracle[name].grad.abs() < 1e-6
        torch.testing.assert_close(
            torch.where(near_zero, 0, weight), torch.where(near_zero, 0, oracle[name].detach()), atol=1e-5, rtol=0
        )


def test_the_gradient_equals_a_plain_loop():
    path = tiny_model()
    batch = make_batch(5, 3)
    engine = make_engine(path)
    engine.forward_backward(batch, POLICY)
    counted = float(batch["loss_mask"].values.sum())
    model = plain_model(path)
    oracle_policy_loss(model, batch).backward()
    found = dict(engine._model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].grad / counted, parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("budget", [1, 20, 64, 200])
@pytest.mark.parametrize("spec", [POLICY, PER_ROW], ids=["per token", "per row"])
def test_results_do_not_depend_on_the_token_budget(spec, budget):
    path = tiny_model()
    batch = make_batch(6, 4)
    silent = batch_of([[4, 5, 6], [7, 8]], [[False] * 3, [False] * 2])  # rows without a loss token count in PER_ROW
    batch = Batch.concat([silent.slice(0, 1), batch, silent.slice(1, 2)])
    outcomes = []
    for tokens in (10_000, budget):
        engine = make_engine(path, lr=1e-3, eps=1e-4, tokens_per_microbatch=tokens)
        logprobs = engine.forward(batch, Outputs())["logprobs"].values
        metrics = engine.forward_backward(batch, spec)
        stepped = engine.optim_step()
        outcomes.append((logprobs, metrics["loss"], stepped["grad_norm"], weights_of(engine)))
    (logprobs, loss, norm, weights), (cut_logprobs, cut_loss, cut_norm, cut_weights) = outcomes
    torch.testing.assert_close(cut_logprobs, logprobs, atol=1e-5, rtol=0)
    assert cut_loss.weight == loss.weight
    assert cut_loss.value == pytest.approx(loss.value, abs=1e-5)
    assert cut_norm == pytest.approx(norm, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(cut_weights[name], weight, atol=1e-5, rtol=0)


def test_two_calls_before_a_step_equal_one_call_with_all_rows():
    path = tiny_model()
    batch = make_batch(4, 2)
    whole, halves = make_engine(path), make_engine(path)
    whole.forward_backward(batch, POLICY)
    for half in batch.split(2):
        halves.forward_backward(half, POLICY)
    assert halves.optim_step()["grad_norm"] == pytest.approx(whole.optim_step()["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("elements", [1 << 20, 100], ids=["at once", "in parts"])
def test_an_entropy_that_is_only_measured_is_the_same_and_changes_no_gradient(elements, monkeypatch):
    monkeypatch.setitem(scores.SCORED_AT_ONCE, "cpu", elements)
    path = tiny_model()
    batch = make_batch(2, 3)
    found = []
    for outputs in (Outputs(temperature=0.7), Outputs(entropy=True, temperature=0.7, entropy_gradient=False)):
        engine = make_engine(path)
        engine.forward_backward(batch, LossSpec("supervised", {}, outputs))
        found.append({name: p.grad.clone() for name, p in engine._model.named_parameters()})
    bare, measuring = found
    assert all(torch.equal(measuring[name], gradient) for name, gradient in bare.items())
    right, measured = (
        engine.forward(batch, Outputs(entropy=True, temperature=0.7, entropy_gradient=has)) for has in (True, False)
    )
    torch.testing.assert_close(measured["entropy"].values, right["entropy"].values, atol=1e-5, rtol=0)


def test_gradients_are_zero_after_a_step():
    engine = make_engine(tiny_model())
    engine.forward_backward(make_batch(2, 2), POLICY)
    engine.optim_step()
    before = weights_of(engine)
    assert engine.optim_step() == {"grad_norm": 0.0, "lr": 1e-6, "skipped": 1.0}
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())


def test_a_step_without_anything_counted_changes_nothing():
    engine = make_engine(tiny_model())
    empty = make_batch(2, 2).slice(0, 0)
    before = weights_of(engine)
    assert engine.forward_backward(empty, POLICY) == {}
    assert len(engine.forward(empty, Outputs())) == 0
    assert engine.optim_step()["skipped"] == 1.0
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())


def test_a_step_with_gradients_that_are_not_finite_is_as_if_it_never_was():
    path = tiny_model()
    batch = make_batch(3, 2)
    options = {"lr": 1e-2, "schedule": "linear", "total_steps": 10}
    engine, undisturbed = make_engine(path, **options), make_engine(path, **options)
    for each in (engine, undisturbed):
        each.forward_backward(batch, POLICY)
        each.optim_step()
    engine.forward_backward(batch, NOT_FINITE)
    before = weights_of(engine)
    assert engine.optim_step()["skipped"] == 1.0
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
    for each in (engine, undisturbed):
        each.forward_backward(batch, POLICY)
    assert engine.optim_step() == undisturbed.optim_step()
    other = weights_of(undisturbed)
    assert all(torch.equal(other[name], weight) for name, weight in weights_of(engine).items())


def test_values_are_of_the_state_each_token_was_drawn_from():
    path = tiny_model()
    batch = make_batch(3, 3)
    engine = make_engine(path, head="value", lr=1e-2)
    values = engine.forward(batch.drop(["loss_mask"]), Outputs(logprobs=False, values=True))
    model, head = plain_model(path), weights_of(engine)["score.weight"]
    for row in range(len(batch)):
        with torch.no_grad():
            hidden = model.model(input_ids=batch.row(row)["input_ids"][None]).last_hidden_state[0]
        wanted = torch.cat([torch.zeros(1), (hidden @ head[0])[:-1]])
        torch.testing.assert_close(values.row(row)["values"], wanted, atol=1e-5, rtol=0)


def test_a_value_head_learns():
    engine = make_engine(tiny_model(tied=False), head="value", lr=1e-2, weight_decay=0.1)
    batch = make_batch(4, 2)
    losses = []
    for _ in range(20):
        losses.append(engine.forward_backward(batch, SQUARED_ERROR)["loss"].value)
        engine.optim_step()
    assert losses[-1] < 0.3 * losses[0]
    assert "lm_head.weight" not in weights_of(engine)


def test_half_precision_weights_learn_from_updates_smaller_than_their_precision():
    from enginehouse.engines.model import ModelSpec, ProcessContext
    from enginehouse_torch.options import TorchTrainOptions
    from enginehouse_torch.train import TorchTrainEngine

    path = tiny_model()
    fine = make_engine(path, lr=1e-4)
    coarse = TorchTrainEngine()
    coarse.setup(ModelSpec(path=path, dtype="bfloat16"), TorchTrainOptions(lr=1e-4), ProcessContext("actor"))
    batch = make_batch(4, 4)
    losses = []
    for engine in (fine, coarse):
        for _ in range(30):
            engine.forward_backward(batch, POLICY)
            engine.optim_step()
        losses.append(engine.forward_backward(batch, POLICY)["loss"].value)
    assert {meta.dtype for meta in coarse.weight_source().metadata()} == {"bfloat16"}
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_what_stays_float32_in_a_model_of_bfloat16_is_trained_too(tmp_path):
    """transformers keeps the routers of some families in float32."""
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    config = Glm4MoeConfig(
        vocab_size=VOCABULARY_SIZE, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = make_engine(str(tmp_path), dtype="bfloat16", lr=1e-2)
    trained = engine._trained_parameters()
    assert {parameter.dtype for parameter in trained.values()} == {torch.bfloat16, torch.float32}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    for _ in range(2):
        engine.forward_backward(make_batch(4, 4), POLICY)
        engine.optim_step()
    assert [name for name, parameter in trained.items() if torch.equal(parameter, before[name])] == []


@pytest.mark.parametrize("what", [("model",), ("optimizer",), ("rng",), ALL])
def test_a_checkpoint_has_and_brings_the_precise_values(tmp_path, what):
    stored = {name: weight.clone() for name, weight in make_engine(tiny_model()).weight_source().iter_full()}
    made = make_engine(tiny_model(), dtype="bfloat16")
    made.save(str(tmp_path / "saved"), ALL)
    engine = make_engine(tiny_model(), dtype="bfloat16")
    engine.load(str(tmp_path / "saved"), what)
    optimizer = engine._get_optimizer()
    assert set(optimizer._parameters) == set(stored)
    for name, weight in stored.items():
        assert torch.equal(optimizer._view(optimizer._values, name), weight)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_the_weights_have_the_names_and_values_of_the_checkpoint(family, tied):
    from safetensors.torch import load_file

    path = tiny_model(family, tied)
    stored = load_file(f"{path}/model.safetensors")
    source = make_engine(path).weight_source()
    assert {meta.name for meta in source.metadata()} == set(stored)
    assert [meta.name for meta in source.metadata()] == [name for name, _ in source.iter_full()]
    assert all(meta.owners == () and meta.shape == tuple(stored[meta.name].shape) for meta in source.metadata())
    assert all(torch.equal(stored[name], weight) for name, weight in source.iter_local())


def test_the_weights_of_fused_experts_are_given_as_the_checkpoint_stores_them(tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    given = dict(make_engine(str(tmp_path)).weight_source().iter_full())
    assert set(given) == set(stored)
    assert all(torch.equal(stored[name], weight) for name, weight in given.items())


def test_asking_for_what_the_head_cannot_give_is_an_error():
    batch = make_batch(1, 1)
    with pytest.raises(EnginehouseError, match="value head"):
        make_engine(tiny_model()).forward(batch, Outputs(values=True))
    with pytest.raises(EnginehouseError, match="logprobs=False"):
        make_engine(tiny_model(), head="value").forward(batch, Outputs(values=True))
    with pytest.raises(EnginehouseError, match="temperature"):
        make_engine(tiny_model()).forward(batch, Outputs(temperature=0.0))


def test_an_unknown_loss_is_an_error():
    with pytest.raises(PluginLookupError):
        make_engine(tiny_model()).forward_backward(make_batch(1, 1), POLICY.__class__("torch_train_cases:no_such_loss"))


def test_a_decaying_schedule_without_an_end_is_refused_at_setup():
    with pytest.raises(ConfigError, match="total_steps"):
        make_engine(tiny_model(), schedule="cosine")


def test_a_path_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ModelError, match="is not a directory"):
        make_engine(str(tmp_path / "missing"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        make_engine(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no weights"):
        make_engine(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        make_engine(str(tmp_path))
    assert caught.value.__cause__ is not None


def test_a_checkpoint_that_lacks_a_weight_is_not_filled_with_random_numbers(tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model(), tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        make_engine(str(tmp_path))


def test_float16_is_refused_with_the_reason():
    with pytest.raises(ModelError, match=r"torch: no engine trains in float16: .* use bfloat16"):
        make_engine(tiny_model(), dtype="float16")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_whose_weights_are_no_numbers_is_refused_by_parameter_and_file(value):
    name = "model.layers.1.mlp.up_proj.weight"
    path = with_weight(tiny_model(), name, (3, 2), value)
    with pytest.raises(ModelError, match=rf"not finite \(NaN or infinite\): {name} in {path}/model.safetensors"):
        make_engine(path)


def test_a_step_that_loses_weights_names_the_step_and_what_to_try():
    engine = make_engine(tiny_model(), lr=1e30, warmup_steps=0)
    engine.forward_backward(make_batch(2, 2), POLICY)
    with pytest.raises(NonFiniteWeights, match=r"optimizer step 1 left weights .* and \d+ more.*lr was 1e\+30.*Try a"):
        engine.optim_step()
    assert not NonFiniteWeights.keeps_state


def test_loading_says_nothing(capfd):
    make_engine(tiny_model())
    said = capfd.readouterr()
    assert said.out + said.err == ""


def test_metrics_of_micro_batches_add_up():
    batch = make_batch(4, 3)
    engine = make_engine(tiny_model(), tokens_per_microbatch=16)
    loss = engine.forward_backward(batch, POLICY)["loss"]
    assert isinstance(loss, Mean)
    assert loss.weight == batch["loss_mask"].values.sum()


def test_on_a_cpu_a_pass_is_no_larger_than_pays(monkeypatch):
    monkeypatch.setattr("enginehouse_torch.train.cpu_tokens", lambda shape, itemsize: 16)
    engine = make_engine(tiny_model(), tokens_per_microbatch=16_384, share_prompts="never")
    parts = engine._token_model.microbatches(make_batch(4, 3))
    assert len(parts) > 1
    assert all(part.layout.tokens.size <= 16 for part in parts)


def test_ragged_results_share_the_offsets_of_the_ids():
    batch = make_batch(2, 2)
    column = make_engine(tiny_model()).forward(batch, Outputs())["logprobs"]
    assert isinstance(column, Ragged)
    assert torch.equal(column.offsets, batch["input_ids"].offsets)
    assert column.values.dtype == torch.float32


@pytest.mark.parametrize("act", ["forward", "forward_backward"])
def test_each_micro_batch_is_noted_as_progress(monkeypatch, act):
    noted = []
    monkeypatch.setattr("enginehouse_torch.modeling.token_model.note_progress", lambda: noted.append(act))
    engine = make_engine(tiny_model(), tokens_per_microbatch=16, share_prompts="never")
    batch = make_batch(4, 3)
    parts = len(engine._token_model.microbatches(batch))
    getattr(engine, act)(batch, Outputs() if act == "forward" else LossSpec("supervised"))
    assert len(noted) == parts > 1
