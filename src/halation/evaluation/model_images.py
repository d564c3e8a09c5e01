"""Images that a model generates for scoring, without writing them to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halation.data.decode import BrokenImageError
from halation.distributed.world import World, run_on_all_ranks
from halation.errors import InputError, format_count
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.drawn_images import DrawnImages
from halation.evaluation.image_sources import LoadedImage, with_digest
from halation.evaluation.preprocess_pool import ExtractorBatch, PreparedBatch, TransformFn, prepare_images
from halation.generation.image_requests import RequestDefaults, iter_requests
from halation.generation.ledger import group_key
from halation.generation.workers.image_runner import ImageModel, dry_run, open_model, run_batch
from halation.models.async_image_result import Frames, ImageError
from halation.models.model_folder import HubOptions
from halation.models.model_path_resolver import ModelRef, resolve_model
from halation.prompt_files import PromptFile, PromptRow
from halation.runs.run_folder import hash_json, read_json_with_digest, write_json_with_digest
from halation.sample_specs import SampleBatch as DrawnBatch
from halation.sample_specs import SampleSpec
from halation.work_division import BatchPlan, plan_batches


@dataclass(kw_only=True)
class ModelImages(DrawnImages):
    """A model and the specs that it generates, in the order of their batches."""

    config: EvaluateConfig
    model_ref: ModelRef
    specs: tuple[SampleSpec, ...]
    prompts_name: str
    batch_plan: BatchPlan
    device: str
    micro_batch: int = 0
    """Micro-batch; known once the model is loaded."""
    _model: ImageModel | None = None

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        return np.concatenate([self.batch_plan.rows(number) for number in range(len(self.batch_plan))])

    @cached_property
    def captions(self) -> tuple[str, ...]:
        return tuple(spec.prompt for spec in self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def facts(self) -> dict[str, Any]:
        config, first = self.config, self.specs[0]
        return {
            "kind": "model",
            "path": config.model_path,
            "model": self.model_ref.digest,
            **self.model_ref.hub_fact,
            "settings": {
                "prompts": self.prompts_name,
                "specs_sha256": self._specs_hash,
                "seed_start": config.seed_start,
                "height": first.height,
                "width": first.width,
                "num_inference_steps": first.steps,
                "guidance_scale": first.guidance_scale,
                "scheduler": config.scheduler,
                "dtype": self._dtype,
                "raw": config.raw,
                "compile": config.compile,
                "sheet_size": config.model_batch_size,
            },
        }

    @cached_property
    def _specs_hash(self) -> str:
        return hash_json([spec.as_json() for spec in self.specs])

    @cached_property
    def key(self) -> str:
        settings = [
            self.config.model_batch_size,
            self._dtype,
            self.config.scheduler,
            self.config.compile,
            self.config.threads,
        ]
        versions = [version(name) for name in ("torch", "diffusers", "transformers")]
        return hash_json([self.model_ref.digest, settings, versions, self.device, self._specs_hash])

    @property
    def _dtype(self) -> str:
        return self.config.model_dtype or ("fp32" if self.device == "cpu" else "bf16")

    def name(self, index: int) -> str:
        return f"image {self.specs[int(self.order[index])].id}"

    def chunk_starts(self, chunk: int) -> list[int]:
        """Return the positions at which chunks start, which are always batch boundaries."""
        lengths = [len(self.batch_plan.rows(number)) for number in range(len(self.batch_plan))]
        per_chunk = max(1, chunk // self.config.model_batch_size)
        firsts = np.concatenate([[0], np.cumsum(lengths)])
        return [int(firsts[number]) for number in range(0, len(lengths), per_chunk)]

    def open_on_ranks(self, world: World, folder: Path, has_chunks: bool) -> None:
        """Load the model and agree on the micro-batch.

        It affects the bits of the images, so that all ranks and all later calls use the same one.
        """
        config, file = self.config, folder / "micro_batch.json"
        saved: int = world.broadcast_from_rank_zero(
            read_json_with_digest(file)["micro_batch"] if world.is_rank_zero and file.is_file() else 0
        )

        def open_and_fit(heartbeat: Callable[[], None]) -> int:
            """Load the model and return how many images of a batch fit into memory in one forward."""
            if not has_chunks:
                return config.model_batch_size
            options = {
                "model": self.model_ref.load_args,
                "device": str(world.device),
                "threads": config.threads,
                "dtype": self._dtype,
                "scheduler": config.scheduler,
                "offload": "none",
                "compile": config.compile,
                "arguments": {},
                "cfg_truncation_step": None,
                "half_frame": False,
                "raw": config.raw,
            }
            self._model = open_model(options)
            heartbeat()
            examples = {group_key(spec): spec for spec in self.specs}
            return saved or dry_run(self._model, list(examples.values()), config.model_batch_size, 0)

        self.micro_batch = min(run_on_all_ranks(world, "opening the model", config.dist_timeout_s, open_and_fit))
        if world.is_rank_zero and not saved:
            folder.mkdir(exist_ok=True)
            write_json_with_digest(file, {"micro_batch": self.micro_batch})

    def iter_prepared(
        self,
        batches: Iterator[ExtractorBatch],
        transforms: Mapping[str, TransformFn],
        on_step: Callable[[], None],
        stop: Callable[[], int],
    ) -> Iterator[tuple[ExtractorBatch, PreparedBatch]]:
        """Yield prepared batches of the extractor's batch size; generate model batches as needed."""
        batch_numbers = np.concatenate([np.full(len(self.batch_plan.rows(n)), n) for n in range(len(self.batch_plan))])
        generated: dict[int, Frames | ImageError] = {}
        for batch in batches:
            for number in sorted({int(batch_numbers[position]) for position in batch.indices}):
                if stop():
                    return
                rows = self.batch_plan.rows(number)
                first = int(np.searchsorted(batch_numbers, number))
                if first not in generated and not any(first + place in generated for place in range(len(rows))):
                    images = self._generate_batch(rows, on_step)
                    generated |= {first + place: image for place, image in enumerate(images)}
            loaders = [(position, partial(self._load_pixels, generated.pop(position))) for position in batch.indices]
            yield batch, prepare_images(loaders, {name: transforms[name] for name in batch.labels})

    @staticmethod
    def _load_pixels(image: Frames | ImageError) -> LoadedImage:
        if isinstance(image, ImageError):
            raise BrokenImageError(str(image))
        return with_digest(image[0])

    def _generate_batch(self, rows: npt.NDArray[np.int64], on_step: Callable[[], None]) -> list[Frames | ImageError]:
        assert self._model is not None
        specs = [self.specs[row] for row in rows.tolist()]
        padding = [specs[-1]] * (self.config.model_batch_size - len(specs))
        batch = DrawnBatch(specs=tuple(specs + padding), num_real=len(specs))
        results: dict[int, Frames | ImageError] = {}
        for piece in run_batch(self._model, batch, self.micro_batch, range(len(specs)), on_step):
            results |= dict(zip(piece.rows, piece.collect(lambda action: action()), strict=True))
        return [results[place] for place in range(len(specs))]


def open_model_images(config: EvaluateConfig, device: str) -> ModelImages:
    """Return the images to generate, without loading the model."""
    if not config.prompts:
        raise InputError(
            "--model_path without --prompts", "prompts to generate images for", "give --prompts FILE, or texts"
        )
    model_ref = resolve_model(config.model_path, raw=config.raw, hub=HubOptions.of(config))
    model_ref.check(config)
    if not ((config.height or model_ref.height) and (config.width or model_ref.width)):
        raise model_ref.no_size_error()
    prompts = PromptFile.from_values(config.prompts)
    defaults = RequestDefaults(
        seed_start=config.seed_start,
        height=model_ref.height if config.height is None else config.height,
        width=model_ref.width if config.width is None else config.width,
        num_frames=1,
        steps=config.num_inference_steps or model_ref.steps,
        guidance_scale=model_ref.guidance_scale if config.guidance_scale is None else config.guidance_scale,
        negative_prompt=config.negative_prompt,
    )

    def check_row(row: PromptRow, spec: SampleSpec) -> None:
        model_ref.check(row, spec.guidance_scale)

    requests = iter_requests(prompts.rows(), defaults, prompts.name, check_row)
    rows = islice(requests, config.num_samples or None)
    specs = tuple(request.spec for request in rows)
    if config.num_samples > len(specs) > 0:
        raise InputError(
            f"--num_samples {config.num_samples} of {format_count(len(specs), 'prompt')} in {prompts.name}",
            "at most the number of prompts",
            "omit --num_samples to use all prompts",
        )
    if not specs:
        raise InputError(f"{prompts.name} holds no prompts", "at least one", "check --prompts")
    groups: dict[Any, list[int]] = {}
    for spec in specs:
        groups.setdefault(group_key(spec), []).append(spec.index)
    ordered = [np.array(rows, np.int64) for rows in groups.values()]
    return ModelImages(
        config=config,
        model_ref=model_ref,
        specs=specs,
        prompts_name=prompts.name,
        batch_plan=plan_batches(ordered, config.model_batch_size),
        device=device,
    )
