"""What a checkpoint holds is in the export again: trained, or as it was, whatever form people saved it in."""

import json
import shutil

import pytest
import torch
from checkpoint_forms import FORMS, copied, faults, prediction_head, rewritten, tensors_of, tied
from families import engine_of
from fsdp_train_cases import make_sharded
from models_with_code import model_with_code  # noqa: F401 - a fixture
from torch_train_cases import POLICY, make_batch, make_engine, weights_of

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.errors import ModelError
from enginehouse.weights import ModelForm
from enginehouse_torch.modeling.examining import examine
from enginehouse_torch.modeling.export import write_companions
from enginehouse_torch.modeling.loading import load_model

ENGINES = {"torch": make_engine, "fsdp": make_sharded}
MTP = {"mtp.layers.0.self_attn.q_proj.weight": torch.ones(64, 32), "mtp.norm.weight": torch.ones(32)}
NOT_TRAINED = ("mtp", "model.layers.2", "model.visual", "vision_tower", "multi_modal_projector", "model.vision_tower")


def exported(engine, to):
    engine.forward_backward(make_batch(2, 2), POLICY)
    engine.optim_step()
    engine.export_hf(str(to))
    engine.shutdown()


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("form", FORMS)
def test_each_stored_tensor_is_trained_or_as_it_was(tmp_path, form, backend):
    source = FORMS[form](tmp_path / "model")
    exported(ENGINES[backend](str(source), lr=1e-2), tmp_path / "export")
    before = tensors_of(source)
    trained = {name for name in before if not name.startswith(NOT_TRAINED) and "multi_modal" not in name}
    assert not faults(source, tmp_path / "export", trained)


@pytest.mark.parametrize("backend", ENGINES)
def test_what_no_text_goes_through_keeps_its_own_dtype(tmp_path, backend):
    source = FORMS["tower_within"](tmp_path / "model")
    exported(ENGINES[backend](str(source), dtype="bfloat16", weight_decay=0.5), tmp_path / "export")
    before, after = tensors_of(source), tensors_of(tmp_path / "export")
    tower = [name for name in before if name.startswith(NOT_TRAINED)]
    assert tower
    assert all(torch.equal(before[name], after[name]) for name in tower)
    assert after["language_model.model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ENGINES)
def test_what_no_text_goes_through_is_served_as_it_was(tmp_path, backend):
    """Weight decay would have made it smaller."""
    engine = ENGINES[backend](str(FORMS["tower_within"](tmp_path / "model")), lr=1e-2, weight_decay=0.5)
    before = weights_of(engine)
    engine.forward_backward(make_batch(2, 2), POLICY)
    engine.optim_step()
    after = weights_of(engine)
    engine.shutdown()
    as_they_were = {name for name in before if torch.equal(before[name], after[name])}
    assert as_they_were == {name for name in before if name.startswith(NOT_TRAINED)}


@pytest.mark.parametrize("form", [*FORMS, "experts_and_a_prediction_head"])
def test_a_replica_in_another_process_expects_what_is_sent(tmp_path, form):
    """Its engine cannot be asked, as vLLM's: the form of the weights is known from the files and the class."""
    if form in FORMS:
        source = FORMS[form](tmp_path / "model")
    else:
        source = rewritten(FORMS["experts"](tmp_path / "model"), lambda weights: weights.update(MTP))
    engine = make_engine(str(source))
    sent = {meta.name: (tuple(meta.shape), meta.dtype) for meta in engine.weight_source().metadata()}
    engine.shutdown()
    assert ModelForm.of(ModelSpec(str(source))).parameters == sent


def test_files_that_lack_a_part_of_a_tensor_cannot_be_updated(tmp_path):
    source = FORMS["experts"](tmp_path / "model")
    rewritten(source, lambda weights: weights.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(ModelError, match=r"do not hold model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        ModelForm.of(ModelSpec(str(source)))


def test_adapters_are_of_what_text_goes_through(tmp_path):
    source = FORMS["tower_within"](tmp_path / "model")
    exported(make_sharded(str(source), lr=1e-2, lora={"rank": 2}), tmp_path / "export")
    before, after = tensors_of(source), tensors_of(tmp_path / "export")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("language_model.model.layers") for name in changed)


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.bias", "model.layers.0.extra_norm.weight", "model.norm.bias"]
)
def test_a_tensor_in_a_part_that_is_read_is_refused_by_name(tmp_path, backend, name):
    source = rewritten(copied(tmp_path / "model"), lambda weights: weights.update({name: torch.zeros(32)}))
    with pytest.raises(ModelError, match=rf"hold {name}, which the model's class does not read"):
        ENGINES[backend](str(source))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_shape_that_the_config_does_not_give_is_refused_before_the_start(tmp_path, name):
    """As after `resize_token_embeddings`, with the config of before."""
    longer = {name: torch.ones(100, 32)}
    source = rewritten(copied(tmp_path / "model"), lambda weights: weights.update(longer))
    with pytest.raises(ModelError, match=rf"{name} has the shape \(100, 32\), but the config requires"):
        examine(ModelSpec(str(source)))


@pytest.mark.parametrize("form", FORMS)
def test_the_shapes_of_each_form_are_its_configs(tmp_path, form):
    examine(ModelSpec(str(FORMS[form](tmp_path / "model"))))


@pytest.mark.parametrize("backend", ENGINES)
def test_a_tied_head_that_differs_is_refused_with_the_cure(tmp_path, backend):
    head = {"lm_head.weight": torch.zeros(32, 32)}
    source = rewritten(tied(tmp_path / "model"), lambda weights: weights.update(head))
    with pytest.raises(
        ModelError, match=r"says tie_word_embeddings.*and lm_head\.weight are one.*Set tie_word_embeddings"
    ):
        ENGINES[backend](str(source))


@pytest.mark.parametrize("backend", ENGINES)
def test_a_value_head_stands_in_for_the_head_alone(tmp_path, backend):
    source = prediction_head(tmp_path / "model")
    engine = ENGINES[backend](str(source), head="value")
    engine.export_hf(str(tmp_path / "export"))
    engine.shutdown()
    before, after = tensors_of(source), tensors_of(tmp_path / "export")
    assert after.keys() == {*before, "score.weight"}


@pytest.mark.parametrize("backend", ENGINES)
def test_files_of_a_model_are_in_its_export(tmp_path, backend):
    source = tied(tmp_path / "model")
    kept = {
        "additional_chat_templates/tool_use.jinja": "tools", "modeling_mine.py": "code", "parts/layer.py": "more",
        "preprocessor_config.json": "{}", "LICENSE": "yours",
        "generation_config.json": '{"do_sample": false, "top_k": 3}',
    }  # fmt: skip
    left = ["optimizer.pt", ".cache/x.json", "consolidated.safetensors", "pytorch_model.bin.index.json", "README.md"]
    for name in [*kept, *left]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(kept.get(name, "{}"))
    engine = ENGINES[backend](str(source))
    engine.export_hf(str(tmp_path / "export"))
    engine.shutdown()
    assert {name: (tmp_path / "export" / name).read_text() for name in kept} == kept
    assert not [name for name in left if (tmp_path / "export" / name).exists()]


def test_a_config_is_the_models_own_but_for_the_dtype(tmp_path):
    """As `transformers` of another version wrote it: whoever could read the model can read the export."""
    source = rewritten(tied(tmp_path / "model"), lambda weights: None, torch_dtype="float32", rope_theta=5e5, mine=[1])
    exported(make_engine(str(source), dtype="bfloat16"), tmp_path / "export")
    was, now = (json.loads((place / "config.json").read_text()) for place in (source, tmp_path / "export"))
    assert now == {**was, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_directory_that_lost_what_is_kept_says_so(tmp_path, engine):
    source = prediction_head(tmp_path / "model")
    made = ENGINES[engine](str(source))
    rewritten(source, lambda weights: weights.pop("mtp.norm.weight"))
    with pytest.raises(ModelError, match=r"lack mtp\.norm\.weight"):
        made.export_hf(str(tmp_path / "export"))
    made.shutdown()


@pytest.mark.parametrize("backend", ENGINES)
def test_code_of_a_model_goes_along_and_loads_without_the_source(tmp_path, model_with_code, backend):  # noqa: F811
    from transformers import AutoModelForCausalLM

    engine, options = engine_of(backend)
    spec = ModelSpec(str(model_with_code.path), trust_remote_code=True)
    options.check_files(spec)
    engine.setup(spec, options, ProcessContext("actor"))
    engine.export_hf(str(tmp_path / "export"))
    engine.shutdown()
    shutil.rmtree(model_with_code.path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)
    assert type(loaded).__name__ == "BroughtForCausalLM"


def test_an_engine_that_leaves_weights_out_has_the_config_of_its_class(tmp_path):
    """As plugins of an earlier contract write: what is not there is not in the config."""
    source = FORMS["tower_beside"](tmp_path / "model")
    spec = ModelSpec(str(source))
    model = load_model(spec, "cpu")
    model.save_pretrained(tmp_path / "export")
    write_companions(tmp_path / "export", model.config, None, model.dtype, type(model).__name__, spec)
    about = json.loads((tmp_path / "export" / "config.json").read_text())
    assert about["architectures"] == ["Qwen3_5ForCausalLM"]
    assert about["model_type"] == "qwen3_5_text"
    assert "vision_config" not in about
