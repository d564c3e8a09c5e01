"""DINOv2 and CLIP through transformers as extractors, and CLIP's embedding of texts."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from halation.errors import InputError
from halation.evaluation.extractors.extractor import DTYPES, Extractor
from halation.evaluation.extractors.model_folder import ClipInput, ModelFolder, clip_input, find_folder
from halation.evaluation.extractors.preparation import Preparation, Rule, SquareResize, described
from halation.evaluation.extractors.text_embedding import UNREADABLE, TextEmbedder

logger = logging.getLogger(__name__)
DEFAULTS = {"dinov2": "facebook/dinov2-large", "clip": "openai/clip-vit-large-patch14"}
DINOV2_SIZE = 224
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_TITLES = {"dinov2": "DINOv2", "clip": "CLIP"}


def open_transformer(name: str, weights: str, *, device: str, dtype: str, rule: Rule, flag: str) -> Extractor:
    """`name` is dinov2, clip, or a folder of either family; `weights` a folder or hub name given by `flag` instead of the default."""
    known = DEFAULTS.get(name)
    if known is None and weights:
        raise InputError(f"--extractor {name} and {flag} {weights}", "one of them names the model", f"leave out {flag}")
    folder = find_folder(weights or known or name, flag)
    kind = _FAMILIES.get(folder.family)
    if kind is None or (known and kind.family != name):
        raise InputError(
            f"{folder.given} is a model of type {folder.family!r}",
            f"a {name} model" if known else f"one of the types {', '.join(sorted(_FAMILIES))}",
            f"check {flag}" if known else "check --extractor",
        )
    called = name if known else Path(name).resolve().name
    extractor = kind(folder, name=called, device=device, dtype=dtype, rule=rule)
    title = _TITLES[name] if known else called
    extractor.fd_title, extractor.kid_title = f"FD-{title}", f"KID-{title}"
    return extractor


class _TransformerExtractor(Extractor):
    """What DINOv2 and CLIP have in common: a folder, its hash, a model in a dtype."""

    family: str
    kind: Any

    def __init__(self, folder: ModelFolder, *, name: str, device: str, dtype: str, rule: Rule) -> None:
        self.name = name
        self.device = torch.device(device)
        self._dtype = DTYPES[dtype]
        self._folder = folder
        self.preparation, preparing = self._prepared(rule)
        self._model: Any = _loaded(self.kind, folder, self._dtype).to(self.device)
        self.facts = {
            "extractor": name,
            "weights": folder.given,
            "weights_sha256": folder.sha256(),
            "model_sha256": folder.model_sha256(),
            "dtype": dtype,
            **preparing,
            "input_size": list(self.preparation.shape[:2]),
            "library": f"transformers {transformers.__version__} on torch {torch.__version__}",
        }

    def _outputs(self, batch: Tensor) -> dict[str, Tensor]:
        """One picture at a time on a CPU: its matrix products round a row by where it stands among the others, a GPU's do not."""
        parts = batch.split(1 if self.device.type == "cpu" else len(batch))
        return {"features": torch.cat([self._features(part) for part in parts])}

    @abstractmethod
    def _features(self, batch: Tensor) -> Tensor:
        """(B, D) in the model's dtype."""

    @abstractmethod
    def _prepared(self, rule: Rule) -> tuple[Preparation, dict[str, Any]]:
        """The preparation, and what to record about it."""

    def _normalised(self, values: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
        """(B, H, W, 3) to (B, 3, H, W) in the model's dtype; the arithmetic is float32 whatever that is."""
        mean_, std_ = (torch.tensor(list(numbers), device=values.device) for numbers in (mean, std))
        return ((values - mean_) / std_).permute(0, 3, 1, 2).to(self._dtype).contiguous()


class Dinov2Extractor(_TransformerExtractor):
    """The class token after the last layer norm, as the FD-DINOv2 of dgm-eval: 224 x 224 by the resize rule, ImageNet's mean and std.

    dgm-eval runs the original code, which stretches the position embeddings (made for 518 x 518) by a factor that is rounded
    otherwise than transformers': compare distances with others made by transformers.
    """

    family = "dinov2"
    kind: Any = transformers.Dinov2Model

    def __init__(self, folder: ModelFolder, *, name: str, device: str, dtype: str, rule: Rule) -> None:
        super().__init__(folder, name=name, device=device, dtype=dtype, rule=rule)
        self.num_features = int(self._model.config.hidden_size)

    def _prepared(self, rule: Rule) -> tuple[Preparation, dict[str, Any]]:
        preparation = SquareResize(size=DINOV2_SIZE, rule=rule)
        shown = {"mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)}
        return preparation, {"resize": rule, "preparation": {**described(preparation), **shown}}

    def _features(self, batch: Tensor) -> Tensor:
        pixels = self._normalised(batch / 255, IMAGENET_MEAN, IMAGENET_STD)
        features: Tensor = self._model(pixel_values=pixels).pooler_output
        return features


class Dinov2RegistersExtractor(Dinov2Extractor):
    """DINOv2 with register tokens, otherwise the same."""

    kind = transformers.Dinov2WithRegistersModel


class ClipExtractor(_TransformerExtractor):
    """CLIP's projected picture embeddings, not normalised; pictures are prepared as the model's own preprocessor_config.json says."""

    family = "clip"
    kind = transformers.CLIPModel
    _input: ClipInput

    def __init__(self, folder: ModelFolder, *, name: str, device: str, dtype: str, rule: Rule) -> None:
        super().__init__(folder, name=name, device=device, dtype=dtype, rule=rule)
        self.num_features = int(self._model.config.projection_dim)
        # Bytes times the factor in float64, then float32: the numbers transformers' processor computes.
        scaled = torch.arange(256, dtype=torch.float64) * self._input.rescale
        self._scaled = scaled.float().to(self.device)
        self._texts: TextEmbedder | None = None

    def _prepared(self, rule: Rule) -> tuple[Preparation, dict[str, Any]]:
        self._input = clip_input(self._folder)
        if rule != "clean":
            logger.warning("--resize %s does not apply to CLIP, which prepares pictures as its own files say", rule)
        facts = {"resize": "as the model's preprocessor_config.json", "preparation": self._input.description}
        return self._input.preparation, facts

    def _features(self, batch: Tensor) -> Tensor:
        features: Tensor = self._model.get_image_features(pixel_values=self.pixels(batch)).pooler_output
        return features

    def pixels(self, batch: Tensor) -> Tensor:
        """What the model is shown: the bytes rescaled and normalised as transformers' processor does it."""
        return self._normalised(self._scaled[batch.int()], self._input.mean, self._input.std)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """(N, D) float32 on the CPU, projected and not normalised; a text that is too long loses its end (see `truncated`)."""
        return self._text_embedder().embed_texts(texts)

    def truncated(self, texts: Sequence[str]) -> list[int]:
        """The indices of texts that are longer than the model reads."""
        return self._text_embedder().truncated(texts)

    def _text_embedder(self) -> TextEmbedder:
        """Opened when it is first needed: a distance between pictures needs no tokenizer."""
        if self._texts is None:
            self._texts = TextEmbedder(self._model, self._folder.path)
        return self._texts


_FAMILIES: dict[str, type[_TransformerExtractor]] = {
    "dinov2": Dinov2Extractor,
    "dinov2_with_registers": Dinov2RegistersExtractor,
    "clip": ClipExtractor,
}


def _loaded(kind: Any, folder: ModelFolder, dtype: torch.dtype) -> nn.Module:
    bar_was_on = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = kind.from_pretrained(
            str(folder.path),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except UNREADABLE as error:
        raise InputError(
            f"{folder.path} cannot be opened as a {kind.__name__}: {type(error).__name__}: {error}",
            "a whole model folder, as save_pretrained writes it",
            "copy the model again",
        ) from error
    finally:
        if bar_was_on:
            transformers.utils.logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{folder.path} lacks {len(missing)} weights, first {missing[0]}; they would be random numbers",
            "weights for every part of the model",
            "download the whole model",
        )
    module: nn.Module = model.eval().requires_grad_(False)
    return module
