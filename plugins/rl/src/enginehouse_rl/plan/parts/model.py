from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from enginehouse.errors import ConfigError, ModelError
from enginehouse_rl.config.paths import has_chat_template, read_model
from enginehouse_rl.config.schema import AnyConfig, RMConfig
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.row_lengths import Tokenizer
from enginehouse_rl.plan.tokenizers import vocabulary


class ModelPart(Part[AnyConfig]):
    """The model that is trained or evaluated, and its tokenizer. Other roles also start from this model, unless the
    config gives them another path.

    Attributes:
        json: the content of `config.json`; empty if the model has a problem.
        tokenizer: the tokenizer; None if the model has a problem.
    """

    json: Mapping[str, Any] = {}
    tokenizer: Tokenizer | None = None

    def settle(self) -> None:
        config, key, path = self.config, self.run.model_key, self.config.model.path
        with self.findings.collecting():
            self.json = read_model(path, key)
            if not isinstance(config, RMConfig):
                check_writes(key, path, self.json)
            if config.data.chat_template and not has_chat_template(path):
                raise ConfigError(f"data.chat_template is true, but the tokenizer in {path} has no chat template")
        if self.json:
            self.tokenizer = Tokenizer(self.findings, config, shows=not self.run.starts)
            self.tokenizer.embeddings = vocabulary(self.json)

    def check_trainable(self, key: str, path: str, model: Mapping[str, Any]) -> None:
        """Reject a model whose `config.json` says that it is quantized, because it could not be exported."""
        quantized = model.get("quantization_config") or (model.get("text_config") or {}).get("quantization_config")
        if quantized:
            method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
            self.refuse(
                f"{key}: config.json in {path} has a quantization_config ({method}), but a quantized model can neither "
                "be trained nor exported. Dequantize it with transformers and save it again. If its safetensors "
                "contain full weights already, as after the conversion of a GGUF file, remove the key from config.json"
            )

    def facts(self) -> Iterable[Fact]:
        section = self.config.model
        names = self.json.get("architectures") or [self.json.get("model_type", "unknown architecture")]
        reason = " (model.dtype is auto: chosen by device)" if section.dtype == "auto" else ""
        step = f"; of step {self.run.model_step}" if self.run.model_step else ""
        yield "model", f"{section.path}: {', '.join(names)} in {self.run.dtype}{reason}{step}"


def check_writes(key: str, path: str, model: Mapping[str, Any]) -> None:
    """Check by a model's `config.json` that it generates text.

    Raises:
        ModelError: it is a classifier.
    """
    (architecture, *_) = model.get("architectures") or [""]
    if architecture.endswith("ForSequenceClassification"):
        raise ModelError(
            f"{key} must be a causal language model, but {path} is a {architecture}: a reward model, such as "
            "`enginehouse rm` trains, cannot generate text"
        )
