"""`halation evaluate`: numbers that can be trusted for a folder, a run or a live model, on every GPU, or an error."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation.config import as_json, check_ranges
from halation.distributed import launcher
from halation.errors import InputError
from halation.evaluation.config import EvaluateConfig
from halation.runs import folder as runs

if TYPE_CHECKING:
    from halation.evaluation.image_sources import Source
    from halation.evaluation.model_images import Live

RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("batch_size", "threads", "num_inference_steps", "sheet_size", "nearest_k"), (1, 10_000)),
    **dict.fromkeys(("kid_subsets", "num_reference"), (1, 10**9)),
    **dict.fromkeys(("num_samples", "bootstrap", "keep_features"), (0, 10**12)),
    "kid_subset_size": (2, 10**9),
    "decode_workers": (-1, 1024),
    "seed_start": (0, 2**63 - 1),
    **dict.fromkeys(("height", "width"), (1, 16_384)),
    "guidance_scale": (0, 1e9),
    "dist_timeout_s": (sys.float_info.min, 1e9),
}
ROUNDING = 1e-9
"""What is nearer to 0 than that is shown as 0; the JSON has the number."""
PICTURES_A_RANK = 128
"""Without a GPU, fewer pictures than that are not worth a further process."""


def run(config: EvaluateConfig) -> int:
    """Score on ranks that are already there or on ranks started here; 0 only if every number that was asked for is there."""
    if config.check:
        return rehearse(config)
    report = evaluated(config)
    if report:
        show(config, report)
    return 0


def evaluated(config: EvaluateConfig) -> dict[str, Any]:
    """The report; empty on ranks that somebody else started, besides the first."""
    check(config)
    source = opened(config)
    config = resolved(config, source)
    if launcher.launched():
        return run_rank(config)
    places = places_of(config, source)
    cache = cache_of(config)
    try:
        runs.make_folder(cache)
    except InputError as error:
        raise InputError(error.found, error.expected, "check its permissions, or choose another --cache_dir") from error
    with tempfile.TemporaryDirectory(prefix="halation_report_") as scratch:
        output = Path(scratch) / "report.json"
        order = replace(config, output=output)
        if len(places) == 1:
            os.environ[launcher.DEVICE] = places[0]
            try:
                run_rank(order)
            finally:
                del os.environ[launcher.DEVICE]
        else:
            launcher.Launcher(__name__, as_json(order), places, 0, Path(scratch)).run()
        report: dict[str, Any] = runs.read_json(output)
    if config.output is not None:
        runs.publish_json(config.output, report)
    return report


def check(config: EvaluateConfig) -> None:
    """What can be refused without looking at anything but the flags."""
    check_ranges(config, {name: limits for name, limits in RANGES.items() if getattr(config, name) is not None})
    check_targets(config)
    if bool(config.generated) == bool(config.model_path):
        found = "both --generated and --model_path" if config.generated else "neither --generated nor --model_path"
        raise InputError(found, "pictures to score, or a model to draw them", "give one of the two")
    if config.prompts == "-":
        raise InputError("--prompts -", "a file, which every rank can read", "write the prompts to a file")
    if len(config.reference) > 1 and not all(path.endswith((".npz", ".safetensors")) for path in config.reference):
        raise InputError(
            f"--reference {' '.join(config.reference)}",
            "one folder, `streets`, or files of statistics",
            "give one; several files of statistics are merged",
        )


def check_targets(config: EvaluateConfig) -> None:
    """Where results go, looked at before they are computed."""
    if config.save_statistics is not None and config.save_statistics.suffix != ".safetensors":
        raise InputError(
            f"--save_statistics {config.save_statistics}", "a file ending in .safetensors", "give it that ending"
        )
    for name in ("output", "save_statistics"):
        path: Path | None = getattr(config, name)
        if path is None:
            continue
        if path.is_dir():
            raise InputError(f"--{name} {path} is a folder", "a file to write", f"give --{name} a file name")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--{name} {path}: {error.strerror or error}", "a file that can be written", f"check --{name}"
            ) from error
        if not os.access(path.parent, os.W_OK):
            raise InputError(
                f"--{name} {path}: its folder cannot be written", "a file that can be written", f"check --{name}"
            )


def rehearse(config: EvaluateConfig) -> int:
    """Open what an evaluation needs besides the pictures, without scoring anything."""
    from halation.evaluation.extractor_plan import FLAGS, cast, embedding, facts_of, rules_of, saved_reference
    from halation.evaluation.extractors.registry import open_extractor
    from halation.evaluation.image_sources import files_below
    from halation.evaluation.metrics.measure import NEEDS_REFERENCE, few

    config = replace(config, extractor=extractor_of(config))
    parts = cast(replace(config, metrics=config.metrics or ("fd", "kid")))
    refuse_mismatch(config.metrics, config.extractor)
    refuse_missing_reference(config, parts.with_reference)
    facts, refused = {}, []
    for label, (name, weights) in parts.extractors.items():
        try:
            extractor = open_extractor(
                name, device="cpu", dtype=config.dtype, resize=config.resize, weights=weights, flag=FLAGS[label]
            )
            facts[label] = facts_of(extractor)
            if label == parts.parts.get("clip"):
                embedding(extractor, ("a prompt",), None)([0])  # the words are another part of the model
        except InputError as error:
            refused.append(error)
    if len(refused) == 1:
        raise refused[0]
    if refused:
        raise InputError(
            "; ".join(error.found for error in refused),
            "; ".join(error.expected for error in refused),
            "; ".join(error.action for error in refused),
        )
    num: int | None = config.num_reference
    statistics = saved_reference(config, parts, facts)
    if statistics is not None:
        num = statistics.num
    elif parts.with_reference and config.reference != ("streets",):
        num = len(files_below(Path(config.reference[0]), "--reference", captions=False))
    coming = {"generated": len(to_come(config))} if config.prompts else {}
    for metric, label in parts.parts.items():
        sides: dict[str, int | None] = {**coming, **({"reference": num} if metric in NEEDS_REFERENCE else {})}
        few(metric, facts[label]["num_features"], sides, rules_of(config, "cpu"))
    for about in facts.values():
        print(f"{about['extractor']}: {about['weights']} ({about['weights_sha256'][:12]})")
    return 0


def to_come(config: EvaluateConfig) -> range:
    """The pictures that a list of prompts will be."""
    from halation.prompts import PromptFile

    listed = sum(1 for _row in PromptFile.open(config.prompts).rows())
    return range(min(config.num_samples or listed, listed))


def extractor_of(config: EvaluateConfig) -> str:
    """The one that was asked for, that made the reference's statistics, or the usual one."""
    if config.extractor:
        return config.extractor
    if config.reference == ("streets",):
        return "streets"
    from halation.evaluation.saved_statistics import made_by

    return made_by(config.reference[0]) if config.reference else "inception"


def refuse_missing_reference(config: EvaluateConfig, wanted_by: Sequence[str]) -> None:
    if "" in config.reference:
        raise InputError(
            '--reference ""', "real pictures, or saved statistics", "check --reference: a variable may be unset"
        )
    if wanted_by and not config.reference:
        raise InputError(
            f"no --reference for {', '.join(wanted_by)}",
            "real pictures to compare with",
            "give --reference FOLDER, `streets`, or saved statistics (.npz, .safetensors)",
        )
    for path in config.reference:
        if path != "streets" and not Path(path).exists():
            raise InputError(
                f"--reference: there is no folder or file {path}",
                "real pictures, or saved statistics",
                "check --reference",
            )


def resolved(config: EvaluateConfig, source: Source | Live) -> EvaluateConfig:
    """The config with the extractor and the metrics written out, and what does not go together refused."""
    from halation.evaluation.extractor_plan import rules_of
    from halation.evaluation.metrics.measure import NEEDS_CAPTIONS, NEEDS_REFERENCE, few

    extractor = extractor_of(config)
    config = replace(config, extractor=extractor)
    metrics: Any = config.metrics or default_metrics(extractor, source)
    if not config.metrics and config.save_statistics is not None and not config.reference:
        metrics = ()
    else:
        refuse_mismatch(metrics, extractor)
    refuse_missing_reference(config, [metric for metric in metrics if metric in NEEDS_REFERENCE])
    worded = [metric for metric in metrics if metric in NEEDS_CAPTIONS]
    if worded and source.captions is None:
        why = getattr(source, "no_captions", "")
        raise InputError(
            f"no prompts for {', '.join(worded)}" + (f" ({why})" if why else ""),
            "the prompt of every picture",
            "give --prompts FILE, or the folder of a `halation generate`",
        )
    for metric in metrics:  # before weights are looked for, or fetched
        few(metric, 0, {"generated": len(source)}, rules_of(config, "cpu"))
    return replace(config, metrics=tuple(dict.fromkeys(metrics)))


def refuse_mismatch(metrics: Sequence[str], extractor: str, prefix: str = "") -> None:
    """A metric that means another extractor than the one that was chosen; `prefix` is that of the flags."""
    if extractor == "streets" and "fid" in metrics:
        raise InputError(
            f"fid with --{prefix}extractor streets",
            "a Frechet distance of Inception features, which is what FID means",
            f"ask for fd (FD-streets), or for --{prefix}extractor inception",
        )


def default_metrics(extractor: str, source: Source | Live) -> tuple[str, ...]:
    if extractor == "inception":
        return ("fid", "kid")
    from halation.evaluation.metrics.caption_agreement import says_something

    worded = extractor == "streets" and source.captions is not None and says_something(source.captions)
    return ("fd", "kid", "prdc", *(("agreement",) if worded else ()))


def opened(config: EvaluateConfig) -> Source | Live:
    """What is scored, looked at without decoding or loading anything."""
    if config.model_path:
        from halation.evaluation.model_images import open_live

        return open_live(config, "cpu")
    from halation.evaluation.session import generated_files

    return generated_files(config)


def places_of(config: EvaluateConfig, source: Source | Live) -> tuple[str, ...]:
    """One rank a GPU; without a GPU as many as the cores and the pictures are worth, because the bits are the same."""
    places = launcher.devices(config.nproc, config.gpu_ids, config.oversubscribe)
    if config.nproc or places != ("cpu",):
        return places
    cores = len(os.sched_getaffinity(0)) // config.threads
    return ("cpu",) * max(1, min(cores, len(source) // PICTURES_A_RANK))


def cache_of(config: EvaluateConfig) -> Path:
    if config.cache_dir is not None:
        return config.cache_dir
    return runs.cache_folder() / "features"


def read_config(path: Path) -> EvaluateConfig:
    values = json.loads(path.read_text())
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    paths = {
        name: Path(values[name]) for name in ("cache_dir", "save_statistics", "output") if values[name] is not None
    }
    return EvaluateConfig(**values | paths)


def run_rank(config: EvaluateConfig) -> dict[str, Any]:
    """One rank; the first leaves the report in --output and returns it."""
    launcher.die_with_parent()
    from halation.distributed.world import joined
    from halation.evaluation.session import Scoring
    from halation.logs import Echo, alone

    world = joined(config.gpu_ids, config.oversubscribe, config.dist_timeout_s, config.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it recommends torchvision, which nothing here needs
    echo = Echo()
    with world.leaving_together(), contextlib.ExitStack() as stack:
        if world.first:
            stack.enter_context(alone(echo))
        report = Scoring(world, config, cache_of(config)).run()
        if world.first and config.output is not None:
            runs.publish_json(config.output, report)
        return report if world.first else {}


def show(config: EvaluateConfig, report: dict[str, Any]) -> None:
    """One JSON object for machines, or a table for people."""
    if config.json:
        print(json.dumps(report, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    reference = report["reference"]
    console = Console()
    num = report["generated"]["num"]
    console.print(f"[bold]{num} picture{'s' if num != 1 else ''}[/bold] of {escape(report['generated']['path'])}")
    if reference:
        console.print(f"against {reference['num'] or 'an unknown number'} of {escape(reference['path'])}")
    if config.save_statistics is not None:
        console.print(f"statistics in {escape(str(config.save_statistics))}")
    if not report["metrics"]:
        return
    table = Table()
    for heading in ("metric", "value", "better", "features"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for found in report["metrics"].values():
        shown = found["value"] if abs(found["value"]) > ROUNDING else 0.0
        value = f"{shown:.4g}" + (f" ± {found['std']:.2g}" if found["std"] is not None else "")
        if "interval" in found:
            value += f" [{found['interval'][0]:.4g}, {found['interval'][1]:.4g}]"
        resize = found["resize"] if found["resize"] in ("clean", "tf", "torch") else "its own"
        how = f"{found['extractor']}, {resize}, {found['precision']}"
        table.add_row(found["name"] + (" *" if found["few"] else ""), escape(value), found["better"], escape(how))
    console.print(table)
    notes: dict[str, list[str]] = {}
    for metric, found in report["metrics"].items():
        if found["few"]:
            notes.setdefault(found["note"], []).append(metric)
    for note, marked in notes.items():
        console.print(f"* {', '.join(marked)}: {note}; not to be compared with numbers of more pictures")
