"""Training engines with one property broken each: what the conformance suite exists to find.

In a module of its own because worker processes import it by name.
"""

import shutil
from dataclasses import replace

import torch

from enginehouse.data import Ragged
from enginehouse.engines.train import ALL, LossValue, Mean, NonFiniteWeights
from enginehouse_torch.modeling.files import parts_of
from enginehouse_torch.optim import FlatAdamW
from enginehouse_torch.train import TorchTrainEngine


class MeanOfMeans(TorchTrainEngine):
    """Divides each micro-batch's loss by its own weight: wrong normalisation over micro-batches."""

    def setup(self, model, options, context):
        super().setup(model, options, context)
        loss = self._token_model._get_loss

        def averaged(name):
            def average(view, **arguments):
                value = loss(name)(view, **arguments)
                return LossValue(value.total / max(value.weight, 1.0), 1.0, value.metrics)

            return average

        self._token_model._get_loss = averaged


class Unreduced(TorchTrainEngine):
    """Keeps each rank's gradient for itself."""

    def _get_optimizer(self):
        if self._optimizer is None:
            trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
            self._optimizer = FlatAdamW(trained, self._options, 1)
        return self._optimizer


class PaddingCounted(TorchTrainEngine):
    """Divides by all tokens, those the loss does not count included."""

    def forward_backward(self, batch, loss):
        metrics = super().forward_backward(batch, loss)
        ids, mask = batch.ragged("input_ids"), batch.ragged("loss_mask")
        self._get_optimizer().count(float(ids.tokens - int(mask.values.sum())))
        return metrics


class StaleExport(TorchTrainEngine):
    """Exports what it was loaded from."""

    def export_hf(self, path):
        self._ranks.on_rank_zero(lambda: shutil.copytree(self._spec.path, path, dirs_exist_ok=True))


class SwappedNames(TorchTrainEngine):
    """Gives two weights of one shape under each other's names, and so exports them: its export reads what it gives."""

    ONE, OTHER = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"

    def weight_source(self):
        return Renamed(super().weight_source(), {self.ONE: self.OTHER, self.OTHER: self.ONE})


class SwappedExperts(TorchTrainEngine):
    """Gives two experts' matrices under each other's names."""

    ONE, OTHER = (f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 3))

    def weight_source(self):
        return Renamed(super().weight_source(), {self.ONE: self.OTHER, self.OTHER: self.ONE})


class Renamed:
    """A weight source under other names."""

    def __init__(self, source, names):
        self._source, self._names = source, names

    def metadata(self):
        return [replace(meta, name=self._names.get(meta.name, meta.name)) for meta in self._source.metadata()]

    def iter_full(self):
        return ((self._names.get(name, name), tensor) for name, tensor in self._source.iter_full())

    def iter_local(self):
        return ((self._names.get(name, name), tensor) for name, tensor in self._source.iter_local())


class WrongMetadata(TorchTrainEngine):
    """Says another dtype than it gives."""

    def weight_source(self):
        source = super().weight_source()
        told = [replace(meta, dtype="bfloat16") for meta in source.metadata()]
        source.metadata = lambda: told
        return source


class PartsElsewhere(TorchTrainEngine):
    """Gives other rows as a rank's own than metadata say."""

    def weight_source(self):
        source = super().weight_source()
        local = source.iter_local
        source.iter_full = lambda: local()
        source.iter_local = lambda: ((name, tensor.roll(1, 0)) for name, tensor in local())
        return source


class UnsavedRandomState(TorchTrainEngine):
    """Forgets the random state of a checkpoint."""

    def load(self, path, what=ALL):
        super().load(path, tuple(part for part in parts_of(what) if part != "rng"))


class ScheduleBegunAnew(TorchTrainEngine):
    """Loads the moments, and counts steps from 0 again."""

    def load(self, path, what=ALL):
        super().load(path, what)
        self._get_optimizer().step_number = 0


class OptimizerLost(TorchTrainEngine):
    """Loads a checkpoint without the moments."""

    def load(self, path, what=ALL):
        super().load(path, what)
        for name, state in self._get_optimizer().state():
            if name.startswith("exp_avg"):
                state.zero_()


class TemperatureIgnored(TorchTrainEngine):
    """Scores and trains at temperature 1."""

    def forward(self, batch, outputs):
        return super().forward(batch, replace(outputs, temperature=1.0))

    def forward_backward(self, batch, loss):
        return super().forward_backward(batch, replace(loss, outputs=replace(loss.outputs, temperature=1.0)))


class OffByOne(TorchTrainEngine):
    """Gives each logprob at the token before its own."""

    def forward(self, batch, outputs):
        found = super().forward(batch, outputs)
        return found.with_columns(
            **{
                name: Ragged.from_list([torch.roll(row, -1) for row in found.ragged(name)], dtype=torch.float32)
                if name == "logprobs"
                else found[name]
                for name in found.columns
            }
        )


class NotFiniteTaken(TorchTrainEngine):
    """Takes every step, with what is no number made 0, and says it was skipped."""

    def optim_step(self):
        optimizer = self._get_optimizer()
        bad = not torch.isfinite(optimizer.sums).all()
        torch.nan_to_num_(optimizer.sums, nan=0.0, posinf=0.0, neginf=0.0)
        return {**super().optim_step(), **({"skipped": 1.0} if bad else {})}


class LostWeightsKept(TorchTrainEngine):
    """Goes on with whatever a step made of the weights."""

    def optim_step(self):
        try:
            return super().optim_step()
        except NonFiniteWeights:
            self._get_optimizer().publish()
            return {"grad_norm": 0.0, "lr": 0.0, "skipped": 0.0}


class DecayForgotten(TorchTrainEngine):
    """Has no weight decay."""

    def setup(self, model, options, context):
        super().setup(model, options.model_copy(update={"weight_decay": 0.0}), context)


class LossMisreported(TorchTrainEngine):
    """Reports the loss of its last call over a wrong weight."""

    def forward_backward(self, batch, loss):
        metrics = dict(super().forward_backward(batch, loss))
        return {**metrics, "loss": Mean(metrics["loss"].total, 1.0)} if "loss" in metrics else metrics


class SmallStepsLost(TorchTrainEngine):
    """Keeps no float32 copy of half-precision weights."""

    def optim_step(self):
        stepped = super().optim_step()
        optimizer = self._get_optimizer()
        for name, parameter in optimizer._parameters.items():
            if parameter.dtype != torch.float32:
                optimizer._view(optimizer._values, name).copy_(parameter)
        return stepped


class BeginsRounded(TorchTrainEngine):
    """Takes its float32 copies from weights that were rounded as they were loaded."""

    def _get_optimizer(self):
        self._is_loaded = True
        return super()._get_optimizer()


class Raising(TorchTrainEngine):
    """Cannot save."""

    def save(self, path, what=ALL):
        raise OSError("the disk is full")


class MomentsLostOffloaded(TorchTrainEngine):
    """Comes back without what its optimizer had learned."""

    def offload(self, tags=ALL):
        if self._optimizer is not None and {"optimizer", *ALL} & set(tags):
            for state in self._optimizer._adamw.state.values():
                state["exp_avg"].zero_()
        super().offload(tags)


class LendsCopies(TorchTrainEngine):
    """Gives copies of its weights, and says that they are its own."""

    def weight_source(self):
        source = super().weight_source()
        iterate = source.iter_local
        source.iter_full = lambda: ((name, tensor.clone()) for name, tensor in iterate())
        return source
