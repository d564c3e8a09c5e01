"""DINOv2 and CLIP extractors on transformers, and CLIP's text embeddings."""

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
from halation.evaluation.extractors import huggingface_resolver
from halation.evaluation.extractors.extractor import Extractor, full_precision
from halation.evaluation.extractors.resize import ImageTransform, ResizeRule, SquareResize, describe_transform
from halation.models.dtypes import DTYPES

_TEXT_BATCH_SIZE = 64
_VOCABULARY_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
logger = logging.getLogger(__name__)
DEFAULT_MODELS = {"dinov2": "facebook/dinov2-large", "clip": "openai/clip-vit-large-patch14"}
DINOV2_SIZE = 224
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_TITLES = {"dinov2": "DINOv2", "clip": "CLIP"}


class TextEmbedder:
    """The text encoder and tokenizer of a CLIP model.

    An embedding does not depend on the other texts of the batch.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self._model = model
        self._tokenizer = _open_tokenizer(folder, vocab_size=int(model.config.text_config.vocab_size))
        self.max_tokens = int(model.config.text_config.max_position_embeddings)
        """Token limit of a text, including its start and end tokens; batches of texts are padded to it."""
        self._batch_size = 1 if model.device.type == "cpu" else _TEXT_BATCH_SIZE

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return projected embeddings (N, D), float32 on the CPU, not normalised.

        Long texts are truncated.
        """
        starts = range(0, len(texts), self._batch_size)
        parts = [self._embed_batch(texts[start : start + self._batch_size]) for start in starts]
        return torch.cat(parts) if parts else torch.empty(0, int(self._model.config.projection_dim))

    def find_truncated(self, texts: Sequence[str]) -> list[int]:
        """Return the indices of texts that exceed the token limit of the model."""
        if not texts:
            return []
        tokens = self._tokenizer(list(texts), truncation=False, padding=False, verbose=False)["input_ids"]
        return [index for index, ids in enumerate(tokens) if len(ids) > self.max_tokens]

    def _embed_batch(self, texts: Sequence[str]) -> Tensor:
        # Always the same number of rows: other shapes may use other kernels, which changes the last bits.
        padded = [*texts, *[""] * (self._batch_size - len(texts))]
        # A single text needs no padding, which takes a third of the time.
        padding = "max_length" if self._batch_size > 1 else False
        tokens = self._tokenizer(
            padded, padding=padding, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self._model.device)
        with torch.inference_mode(), full_precision():
            output = self._model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            )
        embeddings: Tensor = output.pooler_output
        return embeddings[: len(texts)].float().cpu()


def _open_tokenizer(folder: Path, *, vocab_size: int) -> Any:
    # transformers opens a tokenizer without a vocabulary, and every text then gives the same few tokens.
    if not any(all((folder / name).is_file() for name in names) for names in _VOCABULARY_FILES):
        raise InputError(
            f"{folder} has no vocabulary: the model could not distinguish texts",
            "tokenizer.json, or vocab.json and merges.txt, beside the weights",
            "download the complete model",
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise InputError(
            f"the tokenizer of {folder} cannot be opened: {type(error).__name__}: {error}",
            "tokenizer files beside the weights",
            "download the complete model",
        ) from error
    one, other = (tokenizer(text, verbose=False)["input_ids"] for text in ("a red car", "two blue birds"))
    if one == other or max(*one, *other) >= vocab_size:
        raise InputError(
            f"{folder}: the tokenizer does not distinguish texts, or has more tokens than the model's {vocab_size}",
            "the tokenizer the model was trained with",
            "download the complete model",
        )
    return tokenizer


def open_transformers_extractor(
    name: str, weights: str, *, device: str, dtype: str, rule: ResizeRule, flag: str
) -> Extractor:
    """Open a DINOv2 or CLIP extractor.

    `name` is dinov2, clip or a folder of either family; `weights` is a folder or Hub name instead of the default.
    """
    default_model = DEFAULT_MODELS.get(name)
    if default_model is None and weights:
        raise InputError(f"--extractor {name} and {flag} {weights}", "only one of them", f"omit {flag}")
    folder = huggingface_resolver.find_model_folder(weights or default_model or name, flag)
    extractor_class = _FAMILIES.get(folder.model_type)
    if extractor_class is None or (default_model and extractor_class.family != name):
        raise InputError(
            f"{folder.name_or_path} is a model of type {folder.model_type!r}",
            f"a {name} model" if default_model else f"one of the types {', '.join(sorted(_FAMILIES))}",
            f"check {flag}" if default_model else "check --extractor",
        )
    extractor_name = name if default_model else Path(name).resolve().name
    extractor = extractor_class(folder, name=extractor_name, device=device, dtype=dtype, rule=rule)
    title = _TITLES[name] if default_model else extractor_name
    extractor.fd_title, extractor.kid_title = f"FD-{title}", f"KID-{title}"
    return extractor


class _TransformerExtractor(Extractor):
    """The common parts of DINOv2 and CLIP: a folder, its hash, a model in a dtype."""

    family: str
    model_class: Any

    def __init__(
        self, folder: huggingface_resolver.ModelFolder, *, name: str, device: str, dtype: str, rule: ResizeRule
    ) -> None:
        self.name = name
        self.device = torch.device(device)
        self._dtype = DTYPES[dtype]
        self._folder = folder
        self.transform, transform_facts = self._build_transform(rule)
        self._model: Any = _load_model(self.model_class, folder, self._dtype).to(self.device)
        self.facts = {
            "extractor": name,
            "weights": folder.name_or_path,
            "weights_sha256": folder.weights_sha256(),
            "model_sha256": folder.model_sha256(),
            "dtype": dtype,
            **transform_facts,
            "input_size": list(self.transform.shape[:2]),
            "library": f"transformers {transformers.__version__} on torch {torch.__version__}",
        }

    def _outputs(self, batch: Tensor) -> dict[str, Tensor]:
        """Run the model, on a CPU with one image at a time.

        Matrix products on a CPU round a row depending on its position in the batch.
        """
        parts = batch.split(1 if self.device.type == "cpu" else len(batch))
        return {"features": torch.cat([self._features(part) for part in parts])}

    @abstractmethod
    def _features(self, batch: Tensor) -> Tensor:
        """Return features (B, D) in the model's dtype."""

    @abstractmethod
    def _build_transform(self, rule: ResizeRule) -> tuple[ImageTransform, dict[str, Any]]:
        """Return the transform and its facts for the report."""

    def _normalize(self, values: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
        """Normalise (B, H, W, 3) in float32 and return (B, 3, H, W) in the model's dtype."""
        mean_, std_ = (torch.tensor(list(numbers), device=values.device) for numbers in (mean, std))
        return ((values - mean_) / std_).permute(0, 3, 1, 2).to(self._dtype).contiguous()


class Dinov2Extractor(_TransformerExtractor):
    """The class token after the last layer norm, as in FD-DINOv2 of dgm-eval.

    Images are 224 x 224, normalised with ImageNet's mean and std. dgm-eval uses the original code, which interpolates
    the position embeddings (trained at 518 x 518) with a differently rounded factor than transformers. Compare
    distances only with others computed by transformers.
    """

    family = "dinov2"
    model_class: Any = transformers.Dinov2Model

    def __init__(
        self, folder: huggingface_resolver.ModelFolder, *, name: str, device: str, dtype: str, rule: ResizeRule
    ) -> None:
        super().__init__(folder, name=name, device=device, dtype=dtype, rule=rule)
        self.num_features = int(self._model.config.hidden_size)

    def _build_transform(self, rule: ResizeRule) -> tuple[ImageTransform, dict[str, Any]]:
        transform = SquareResize(size=DINOV2_SIZE, rule=rule)
        shown = {"mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)}
        return transform, {"resize": rule, "preparation": {**describe_transform(transform), **shown}}

    def _features(self, batch: Tensor) -> Tensor:
        pixels = self._normalize(batch / 255, IMAGENET_MEAN, IMAGENET_STD)
        features: Tensor = self._model(pixel_values=pixels).pooler_output
        return features


class Dinov2RegistersExtractor(Dinov2Extractor):
    """DINOv2 with register tokens, otherwise the same."""

    model_class = transformers.Dinov2WithRegistersModel


class ClipExtractor(_TransformerExtractor):
    """CLIP's projected image embeddings, not normalised.

    Images are preprocessed as in preprocessor_config.json.
    """

    family = "clip"
    model_class = transformers.CLIPModel
    _preprocessing: huggingface_resolver.ClipPreprocessing

    def __init__(
        self, folder: huggingface_resolver.ModelFolder, *, name: str, device: str, dtype: str, rule: ResizeRule
    ) -> None:
        super().__init__(folder, name=name, device=device, dtype=dtype, rule=rule)
        self.num_features = int(self._model.config.projection_dim)
        # Bytes times the factor in float64, then float32, as transformers' processor computes.
        scaled = torch.arange(256, dtype=torch.float64) * self._preprocessing.rescale
        self._rescale_table = scaled.float().to(self.device)
        self._embedder: TextEmbedder | None = None

    def _build_transform(self, rule: ResizeRule) -> tuple[ImageTransform, dict[str, Any]]:
        self._preprocessing = huggingface_resolver.read_clip_preprocessing(self._folder)
        if rule != "clean":
            logger.warning("--resize %s does not apply to CLIP, which uses the preprocessing of its model folder", rule)
        facts = {"resize": "as the model's preprocessor_config.json", "preparation": self._preprocessing.description}
        return self._preprocessing.transform, facts

    def _features(self, batch: Tensor) -> Tensor:
        features: Tensor = self._model.get_image_features(pixel_values=self.pixel_values(batch)).pooler_output
        return features

    def pixel_values(self, batch: Tensor) -> Tensor:
        """Return the model's input: bytes rescaled and normalised as by transformers' processor."""
        return self._normalize(self._rescale_table[batch.int()], self._preprocessing.mean, self._preprocessing.std)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return projected embeddings (N, D), float32 on the CPU, not normalised.

        Long texts are truncated.
        """
        return self._text_embedder().embed_texts(texts)

    def find_truncated(self, texts: Sequence[str]) -> list[int]:
        """Return the indices of texts that exceed the token limit of the model."""
        return self._text_embedder().find_truncated(texts)

    def _text_embedder(self) -> TextEmbedder:
        """Return the text embedder; opened on first use, because image metrics need no tokenizer."""
        if self._embedder is None:
            self._embedder = TextEmbedder(self._model, self._folder.path)
        return self._embedder


_FAMILIES: dict[str, type[_TransformerExtractor]] = {
    "dinov2": Dinov2Extractor,
    "dinov2_with_registers": Dinov2RegistersExtractor,
    "clip": ClipExtractor,
}


def _load_model(model_class: Any, folder: huggingface_resolver.ModelFolder, dtype: torch.dtype) -> nn.Module:
    had_progress_bar = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = model_class.from_pretrained(
            str(folder.path),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise InputError(
            f"{folder.path} cannot be opened as a {model_class.__name__}: {type(error).__name__}: {error}",
            "a complete model folder, as written by save_pretrained",
            "copy the model again",
        ) from error
    finally:
        if had_progress_bar:
            transformers.utils.logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{folder.path} lacks {len(missing)} weights, first {missing[0]}; they would be random",
            "weights for every part of the model",
            "download the complete model",
        )
    module: nn.Module = model.eval().requires_grad_(False)
    return module
