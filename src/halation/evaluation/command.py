"""`halation evaluate`: numbers that can be trusted for a folder, a run or a live model, on every GPU, or an error."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation.config import check_settings
from halation.distributed import launcher
from halation.errors import InputError
from halation.evaluation.config import EvaluateConfig, fid_conflict
from halation.evaluation.image_sources import ImageFiles, find_image_files
from halation.evaluation.metrics.caption_agreement import has_street_captions
from halation.logging_setup import ConsoleWarningHandler, exclusive_console_handler
from halation.prompt_files import PromptFile
from halation.runs import run_folder as runs
from halation.runs.lock import FolderMonitor

if TYPE_CHECKING:
    from halation.evaluation.model_images import ModelImages

DISPLAY_TOLERANCE = 1e-9
"""What is nearer to 0 than that is shown as 0; the JSON has the number."""
MIN_IMAGES_PER_RANK = 128
"""Without a GPU, fewer images than that are not worth a further process."""


def run(config: EvaluateConfig) -> int:
    """Score on ranks that are already there or on ranks started here; 0 only if every number that was asked for is there."""
    if config.check:
        return dry_run(config)
    report = evaluate(config)
    if report:
        print_report(config, report)
    return 0


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """The report; empty on ranks that somebody else started, besides the first."""
    from halation.evaluation.session import open_images

    check_settings(config)
    check_output_paths(config)
    with exclusive_console_handler(ConsoleWarningHandler()):
        source = open_images(config)
    config = resolve_config(config, source)
    cache = feature_cache_folder(config)
    try:
        runs.make_folder(cache)
    except InputError as error:
        raise InputError(error.found, error.expected, "check its permissions, or choose another --cache_dir") from error
    result_files = [path for path in (config.output, config.save_statistics) if path is not None]
    with FolderMonitor(cache, *(path.parent for path in result_files)) as monitor:
        if launcher.is_launched():
            return run_rank(config, source)
        report = _run_ranks(config, source, monitor)
        if config.output is not None:
            runs.write_json_with_digest(config.output, report)
    return report


def _run_ranks(config: EvaluateConfig, source: ImageFiles | ModelImages, monitor: FolderMonitor) -> dict[str, Any]:
    devices = rank_devices(config, source)
    with runs.scratch_folder("halation_report_") as scratch:
        output = scratch / "report.json"
        rank_config = replace(config, output=output)
        if len(devices) == 1:
            os.environ[launcher.DEVICE_ENV] = devices[0]
            try:
                run_rank(rank_config, source)
            finally:
                del os.environ[launcher.DEVICE_ENV]
        else:
            launcher.Launcher(run_rank, rank_config, devices, 0, scratch, monitor).run()
        report: dict[str, Any] = runs.read_json_with_digest(output)
    return report


def check_output_paths(config: EvaluateConfig) -> None:
    """Where results go, looked at before they are computed."""
    for name in ("output", "save_statistics"):
        path: Path | None = getattr(config, name)
        if path is None:
            continue
        if path.is_dir():
            raise InputError(f"--{name} {path} is a folder", "a file to write", f"give --{name} a file name")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            error = "" if os.access(path.parent, os.W_OK) else "its folder cannot be written"
        except OSError as problem:
            error = problem.strerror or str(problem)
        if error:
            raise InputError(f"--{name} {path}: {error}", "a file that can be written", f"check --{name}")


def dry_run(config: EvaluateConfig) -> int:
    """Open what an evaluation needs besides the images, without scoring anything."""
    from halation.evaluation.evaluator import extractor_facts, metric_settings, plan_extractors
    from halation.evaluation.metrics.metric_computation import NEEDS_REFERENCE, check_num_images
    from halation.evaluation.session import read_saved_reference

    config = replace(config, extractor=choose_extractor(config))
    plan = plan_extractors(replace(config, metrics=config.metrics or ("fd", "kid")))
    fid_conflict().check(config)
    check_reference(config, plan.reference_labels)
    facts, errors = {}, []
    for label in plan.extractors:
        try:
            extractor = plan.open_extractor(label, config, "cpu")
            facts[label] = extractor_facts(extractor)
            if label == plan.metric_labels.get("clip"):
                extractor.embed_texts(("a prompt",))  # the text encoder is another part of the model
        except InputError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise InputError(
            "; ".join(error.found for error in errors),
            "; ".join(error.expected for error in errors),
            "; ".join(error.action for error in errors),
        )
    num_reference: int | None = config.num_reference
    statistics = read_saved_reference(config, plan, facts)
    if statistics is not None:
        num_reference = statistics.num
    elif plan.reference_labels and config.reference != ("streets",):
        num_reference = len(find_image_files(Path(config.reference[0]), "--reference", captions=False))
    num_generated: dict[str, int | None] = {}
    if config.prompts:
        num_rows = sum(1 for _row in PromptFile.open(config.prompts).rows())
        num_generated = {"generated": min(config.num_samples or num_rows, num_rows)}
    for metric, label in plan.metric_labels.items():
        num_images: dict[str, int | None] = {
            **num_generated,
            **({"reference": num_reference} if metric in NEEDS_REFERENCE else {}),
        }
        check_num_images(metric, facts[label]["num_features"], num_images, metric_settings(config, "cpu"))
    for about in facts.values():
        print(f"{about['extractor']}: {about['weights']} ({about['weights_sha256'][:12]})")
    return 0


def choose_extractor(config: EvaluateConfig) -> str:
    """The one that was asked for, that made the reference's statistics, or the usual one."""
    if config.extractor:
        return config.extractor
    if config.reference == ("streets",):
        return "streets"
    from halation.evaluation.saved_statistics import read_extractor_name

    return read_extractor_name(config.reference[0]) if config.reference else "inception"


def check_reference(config: EvaluateConfig, metrics: Sequence[str]) -> None:
    if "" in config.reference:
        raise InputError(
            '--reference ""', "real images, or saved statistics", "check --reference: a variable may be unset"
        )
    if metrics and not config.reference:
        raise InputError(
            f"no --reference for {', '.join(metrics)}",
            "real images to compare with",
            "give --reference FOLDER, `streets`, or saved statistics (.npz, .safetensors)",
        )
    for path in config.reference:
        if path != "streets" and not Path(path).exists():
            raise InputError(
                f"--reference: there is no folder or file {path}",
                "real images, or saved statistics",
                "check --reference",
            )


def resolve_config(config: EvaluateConfig, source: ImageFiles | ModelImages) -> EvaluateConfig:
    """The config with the extractor and the metrics written out, and what does not go together refused."""
    from halation.evaluation.evaluator import metric_settings
    from halation.evaluation.metrics.metric_computation import NEEDS_CAPTIONS, NEEDS_REFERENCE, check_num_images

    extractor = choose_extractor(config)
    config = replace(config, extractor=extractor)
    metrics: Any = config.metrics or default_metrics(extractor, source)
    if not config.metrics and config.save_statistics is not None and not config.reference:
        metrics = ()
    config = replace(config, metrics=tuple(dict.fromkeys(metrics)))
    fid_conflict().check(config)
    check_reference(config, [metric for metric in metrics if metric in NEEDS_REFERENCE])
    caption_metrics = [metric for metric in metrics if metric in NEEDS_CAPTIONS]
    if caption_metrics and source.captions is None:
        why = getattr(source, "no_captions", "")
        raise InputError(
            f"no prompts for {', '.join(caption_metrics)}" + (f" ({why})" if why else ""),
            "the prompt of every image",
            "give --prompts FILE, or the folder of a `halation generate`",
        )
    for metric in metrics:  # before weights are looked for, or fetched
        check_num_images(metric, 0, {"generated": len(source)}, metric_settings(config, "cpu"))
    return config


def default_metrics(extractor: str, source: ImageFiles | ModelImages) -> tuple[str, ...]:
    if extractor == "inception":
        return ("fid", "kid")
    has_captions = extractor == "streets" and source.captions is not None and has_street_captions(source.captions)
    return ("fd", "kid", "prdc", *(("agreement",) if has_captions else ()))


def rank_devices(config: EvaluateConfig, source: ImageFiles | ModelImages) -> tuple[str, ...]:
    """One rank a GPU; without a GPU as many as the cores and the images are worth, because the bits are the same."""
    devices = launcher.select_devices(config.nproc, config.gpu_ids, config.oversubscribe)
    if config.nproc or devices != ("cpu",):
        return devices
    cores = len(os.sched_getaffinity(0)) // config.threads
    return ("cpu",) * max(1, min(cores, len(source) // MIN_IMAGES_PER_RANK))


def feature_cache_folder(config: EvaluateConfig) -> Path:
    if config.cache_dir is not None:
        return config.cache_dir
    return runs.cache_folder() / "features"


def run_rank(config: EvaluateConfig, source: ImageFiles | ModelImages | None = None) -> dict[str, Any]:
    """One rank; the first writes the report to --output and returns it. `source` is given where it is already open."""
    launcher.tie_rank_to_launcher()
    from halation.distributed.world import init_world
    from halation.evaluation.session import EvaluationSession

    world = init_world(config.gpu_ids, config.oversubscribe, config.dist_timeout_s, config.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it recommends torchvision, which nothing here needs
    echo = ConsoleWarningHandler()
    with world.close_on_success(), contextlib.ExitStack() as stack:
        if world.is_rank_zero:
            stack.enter_context(exclusive_console_handler(echo))
        report = EvaluationSession(world, config, feature_cache_folder(config), source).run()
        if world.is_rank_zero and config.output is not None:
            runs.write_json_with_digest(config.output, report)
        return report if world.is_rank_zero else {}


def print_report(config: EvaluateConfig, report: dict[str, Any]) -> None:
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
    left_out = report["generated"].get("num_left_out", 0)
    console.print(f"[bold]{num} image{'s' if num != 1 else ''}[/bold] of {escape(report['generated']['path'])}")
    if left_out:
        console.print(f"{left_out} of other formats left out")
    if reference:
        console.print(f"against {reference['num'] or 'an unknown number'} of {escape(reference['path'])}")
    if config.save_statistics is not None:
        console.print(f"statistics in {escape(str(config.save_statistics))}")
    if not report["metrics"]:
        return
    table = Table()
    for heading in ("metric", "value", "better", "features"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for measured in report["metrics"].values():
        shown = measured["value"] if abs(measured["value"]) > DISPLAY_TOLERANCE else 0.0
        value = f"{shown:.4g}" + (f" ± {measured['std']:.2g}" if measured["std"] is not None else "")
        if "interval" in measured:
            value += f" [{measured['interval'][0]:.4g}, {measured['interval'][1]:.4g}]"
        resize = measured["resize"] if measured["resize"] in ("clean", "tf", "torch") else "its own"
        features = f"{measured['extractor']}, {resize}, {measured['precision']}"
        table.add_row(
            measured["name"] + (" *" if measured["few"] else ""), escape(value), measured["better"], escape(features)
        )
    console.print(table)
    notes: dict[str, list[str]] = {}
    for metric, measured in report["metrics"].items():
        if measured["few"]:
            notes.setdefault(measured["note"], []).append(metric)
    for note, marked in notes.items():
        console.print(f"* {', '.join(marked)}: {note}; not to be compared with numbers of more images")
