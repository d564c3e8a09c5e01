"""Downloads models from the Hugging Face Hub: selection of files, progress, errors."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import filelock
import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from halation import input_files
from halation.errors import PERMISSION_ERRNOS, RESOURCE_ERRNOS, InputError
from halation.models.model_folder import HUB_FACT, HUB_FILE, HubOptions
from halation.models.pipelines.folder_safety_check import PICKLE_SUFFIXES
from halation.progress import StepProgress
from halation.runs import run_folder as runs

log = logging.getLogger(__name__)

INDEX_FILE = "model_index.json"
# The HTTP library of huggingface_hub changes between versions; HfHubHTTPError is a subclass of that library's error.
NETWORK_ERROR: type[BaseException] = errors.HfHubHTTPError.__bases__[0]
MODEL_ENDINGS = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Files of a repository that is not a diffusers pipeline, such as an export of Halation."""
NUM_THREADS = 8
MAX_TRIES, MAX_NETWORK_TRIES = 5, 3
MAX_WAIT_S = 60.0
ORPHAN_AGE_S = 600.0
_POLL_S = 0.5
_NUM_SHOWN = 8
_SHARD = r"\d{5}-of-\d{5}"
_WEIGHTS = r"(diffusion_pytorch_model|pytorch_model|model|weights)"
_SUFFIX = r"(bin|safetensors|onnx|pb)"
_ROOT_FILES = {
    *(INDEX_FILE, "scheduler_config.json", "config.json", "chat_template.jinja", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json"),
}
_OTHER_FORMATS = ("bin", "msgpack", "onnx", "pb")
_COMMIT = re.compile(r"[0-9a-f]{40}")
T = TypeVar("T")


# -- which files


def select_files(filenames: Collection[str], index: Mapping[str, Any], variant: str | None, name: str) -> list[str]:
    """Return the files of a repository that its pipeline loads, as DiffusionPipeline.download does.

    They are the safetensors weights of the components (of the variant, where a component has it), the configs, and
    all files of components without weights. Code and pickles are left out. diffusers is not imported for this: the
    process that starts the ranks does not import torch.
    """
    _check_no_remote_code(filenames, index, name)
    names = set(filenames) - set(index.get("_ignore_files", []))
    folders = [key for key, value in index.items() if isinstance(value, list) and key != "_class_name"]
    weights = {file for file in names if file.endswith(("bin", "safetensors", "onnx", "pb", "flashpack"))}
    model_folders = {os.path.dirname(file) for file in weights} & set(folders)
    _check_safetensors(weights, model_folders, variant, name)
    chosen = _select_weights(names, variant, name)
    chosen |= {file for folder in set(folders) - model_folders for file in names if file.startswith(f"{folder}/")}
    chosen |= names & (_ROOT_FILES | {f"{folder}/config.json" for folder in model_folders})
    other = re.compile(rf"\.({'|'.join(_OTHER_FORMATS)})(\.index\..*json)?$")
    return sorted(
        file for file in chosen if not other.search(file) and not file.endswith((".py", ".pyc", *PICKLE_SUFFIXES))
    )


def _check_no_remote_code(filenames: Collection[str], index: Mapping[str, Any], name: str) -> None:
    needed = [str(index["_class_name"])] if isinstance(index.get("_class_name"), list) else []
    needed += [
        f"{key}/{value[0]}.py"
        for key, value in index.items()
        if isinstance(value, list) and value and f"{key}/{value[0]}.py" in filenames
    ]
    if needed:
        raise InputError(
            f"{name} on the Hub needs code that comes with the model ({needed[0]})",
            "a pipeline whose classes are part of diffusers or transformers",
            "use a model that needs no remote code; Halation never runs code of a model repository",
        )


def _matching(files: Collection[str], pattern: str) -> set[str]:
    expression = re.compile(pattern)
    return {file for file in files if expression.match(os.path.basename(file))}


def _variants(files: Collection[str]) -> list[str]:
    """Return the variants of which there are safetensors weights."""
    pattern = re.compile(rf".*/{_WEIGHTS}\.([\w-]+?)(-{_SHARD})?\.safetensors$")
    return sorted({match[2] for file in files if (match := pattern.match(file))})


def _check_safetensors(weights: Collection[str], folders: Collection[str], variant: str | None, name: str) -> None:
    """Raise if a component with weights has none in safetensors."""
    for folder in sorted(folders):
        files = [file for file in weights if os.path.dirname(file) == folder]
        of_variant = (
            _matching(files, rf"{_WEIGHTS}\.{re.escape(variant)}(-{_SHARD})?\.{_SUFFIX}$") if variant else set()
        )
        found = of_variant or _matching(files, rf"{_WEIGHTS}(-{_SHARD})?\.{_SUFFIX}$")
        variants = _variants(files)
        if not found:
            raise InputError(
                f"{name} on the Hub has no {f'{variant} or ' if variant else ''}plain weights of {folder}: it has "
                + (f"only the variants {', '.join(variants)}" if variants else f"only {os.path.basename(min(files))}"),
                "weights under the names that diffusers and transformers load",
                f"give --variant {variants[0]}" if variants else "choose another model or --revision",
            )
        if not any(file.endswith(".safetensors") for file in found):
            raise InputError(
                f"{name} on the Hub has the weights of {folder} only as {os.path.basename(min(found))}, "
                "not as safetensors",
                "safetensors weights; loading a pickle can run any code",
                "choose another model, --variant or --revision; or, if you trust the files, convert them once: "
                "DiffusionPipeline.from_pretrained(...).save_pretrained(FOLDER), and give the folder",
            )


def _select_weights(names: set[str], variant: str | None, name: str) -> set[str]:
    """Return the weight files and their indexes: those of the variant where a component has it."""
    usable = {file for file in names if not file.endswith(_OTHER_FORMATS)}
    components: dict[str, set[str]] = {}
    for file in usable:
        components.setdefault(os.path.dirname(file) if file.count("/") == 1 else "", set()).add(file)
    plain: set[str] = set()
    of_variant: set[str] = set()
    for files in components.values():
        chosen: set[str] = set()
        if variant:
            own = re.escape(variant)
            chosen = _matching(files, rf"{_WEIGHTS}\.{own}(-{_SHARD})?\.{_SUFFIX}$")
            index = rf"{_WEIGHTS}\.{_SUFFIX}\.index\.{own}\.json$"
            if not chosen:  # the names of diffusers before 0.28
                chosen = _matching(files, rf".*-{_SHARD}\.{own}\.[a-z]+$")
                index = rf"{_WEIGHTS}\.{_SUFFIX}\.{own}\.index\.json$"
            of_variant |= chosen and chosen | _matching(files, index)
        if not chosen:
            plain |= _matching(files, rf"{_WEIGHTS}((-{_SHARD})?\.{_SUFFIX}$|\.{_SUFFIX}\.index\.json)")
    if variant and not of_variant:
        found = _variants(usable)
        raise InputError(
            f"--variant {variant}, but {name} on the Hub has no safetensors weights of this variant",
            f"one of its variants: {', '.join(found)}" if found else "no --variant: this model has only plain weights",
            f"use --variant {found[0]}, or leave it out" if found else "leave --variant out",
        )
    return plain | of_variant


# -- download


@dataclass(frozen=True, kw_only=True)
class _Repository:
    """A model repository at one commit, and its place in the cache."""

    name: str
    flag: str
    options: HubOptions
    cache: Path
    commit: str = ""
    sizes: Mapping[str, int] | None = None
    """Size of each file; None if the Hub was not asked."""
    blobs: Mapping[str, str] | None = None

    @property
    def folder(self) -> Path:
        return self.cache / f"models--{self.name.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / self.commit

    @property
    def view(self) -> Path:
        """Folder of links to the selected files alone.

        Other programs, and other variants, add files to the snapshot, which must not change the model of a run.
        """
        place = self.folder
        if not os.access(_existing(place), os.W_OK):  # a cache that is shared and read-only
            place = runs.cache_folder() / "hub" / place.name
        return place / "halation" / (self.commit + (f"-{self.options.variant}" if self.options.variant else ""))

    def is_cached(self, file: str) -> bool:
        blob = (self.blobs or {}).get(file)
        return (self.snapshot / file).exists() or bool(blob and (self.folder / "blobs" / blob).exists())


def download_model(name: str, options: HubOptions, flag: str, *, pipelines_only: bool = False) -> Path:
    """Return the folder of a model of the Hub: cached, or downloaded by one process at a time.

    A commit that is complete in the cache needs no network. `pipelines_only` refuses a repository that is not a
    diffusers pipeline before its download.
    """
    repository = _Repository(name=name, flag=flag, options=options, cache=Path(constants.HF_HUB_CACHE))
    commit, snapshot = _recorded_commit(repository)
    if snapshot is not None:
        return snapshot
    commit = commit or (options.revision or "")
    if _COMMIT.fullmatch(commit):
        repository = replace(repository, commit=commit)
        if _is_complete(repository.view):
            return repository.view
    with _explain_errors(repository):
        if constants.HF_HUB_OFFLINE:
            return _open_cached(repository, "HF_HUB_OFFLINE is set")
        try:
            repository = _retry(lambda: _list_files(repository, commit or None))
        except (NETWORK_ERROR, OSError) as error:
            if _status(error) not in (None, 429, 500, 502, 503, 504) or isinstance(
                error, errors.LocalEntryNotFoundError
            ):
                raise
            return _open_cached(repository, _reason(error), error)
        with _lock(repository):
            if _is_complete(repository.view):
                return repository.view
            index = _read_index(repository, pipelines_only)
            assert repository.sizes is not None
            files = [file for file in repository.sizes if file.endswith(MODEL_ENDINGS)]
            if index is not None:
                files = select_files(repository.sizes, index, options.variant, name)
            _remove_orphans(repository)
            _download_files(repository, [file for file in files if not (repository.snapshot / file).exists()])
            return _publish_view(repository, files)


def _recorded_commit(repository: _Repository) -> tuple[str, Path | None]:
    """Return the commit that a resumed run was started with, so that a moved branch is not followed.

    A run of an earlier version recorded no commit, and its model is the whole snapshot folder, which is returned too.
    """
    options, name = repository.options, repository.name
    if options.output_dir is None or not (options.output_dir / runs.CONFIG_FILE).is_file():
        return "", None
    record = runs.read_record(runs.RunFolder(options.output_dir))
    settings, fixed = record.get("settings", {}), record["fixed"]
    if (settings.get("revision"), settings.get("variant")) != (options.revision, options.variant):
        return "", None  # resuming is refused later, with the difference
    known, _, commit = str(fixed.get(HUB_FACT, "")).rpartition("@")
    if known:
        return (commit, None) if known == name else ("", None)
    path = str(settings.get("teacher_path") or settings.get("model_path") or "")
    reference = repository.folder / "refs" / constants.DEFAULT_REVISION
    if path == name and reference.is_file():
        path = str(repository.folder / "snapshots" / reference.read_text().strip())
    is_snapshot = Path(path).parent == (repository.folder / "snapshots") and (Path(path) / INDEX_FILE).exists()
    return "", Path(path) if is_snapshot and not options.variant else None


def _list_files(repository: _Repository, revision: str | None) -> _Repository:
    """Ask the Hub for the commit of a revision and the files of that commit."""
    info = huggingface_hub.HfApi().model_info(repository.name, revision=revision, files_metadata=True)
    siblings = [file for file in info.siblings or [] if _is_relative(file.rfilename)]
    return replace(
        repository,
        commit=info.sha or "",
        sizes={file.rfilename: file.size or 0 for file in siblings},
        blobs={file.rfilename: (file.lfs.sha256 if file.lfs else file.blob_id) or "" for file in siblings},
    )


def _is_relative(file: str) -> bool:
    """Return True for a path that stays in its folder: the names come from the server."""
    return not file.startswith("/") and "\\" not in file and ".." not in file.split("/")


def _read_index(repository: _Repository, pipelines_only: bool) -> dict[str, Any] | None:
    """Download and read model_index.json; None for a model that is not a pipeline."""
    name, options = repository.name, repository.options
    if repository.sizes is not None and INDEX_FILE not in repository.sizes:
        if pipelines_only or options.variant:
            raise InputError(
                f"{name} on the Hub is not a diffusers pipeline: it has no {INDEX_FILE}",
                "a repository written by save_pretrained() or push_to_hub() of a pipeline",
                f"check --{repository.flag}; single-file checkpoints and adapters are in repositories of their own, "
                "and their pages name the pipeline they belong to",
            )
        return None
    # Asking for the branch, not the commit, notes in the cache where the branch points to, for later offline calls.
    revision = options.revision or constants.DEFAULT_REVISION
    path = Path(_retry(lambda: huggingface_hub.hf_hub_download(name, INDEX_FILE, revision=revision)))
    if path.parent.name != repository.commit:  # the branch moved, or a recorded commit is wanted
        path = Path(_retry(lambda: huggingface_hub.hf_hub_download(name, INDEX_FILE, revision=repository.commit)))
    index = input_files.read_json(path)
    if not isinstance(index, dict):
        raise InputError(f"{path} is not a JSON object", "a pipeline's index", "choose another model or --revision")
    return index


def _download_files(repository: _Repository, files: Sequence[str]) -> None:
    """Announce and download files on several threads, with one display for all of them."""
    if not files:
        return
    assert repository.sizes is not None
    missing = {file: repository.sizes[file] for file in files if not repository.is_cached(file)}
    total, free = sum(missing.values()), shutil.disk_usage(_existing(repository.cache)).free
    options, name = repository.options, repository.name
    what = f"{len(missing)} file{'s' if len(missing) != 1 else ''} of {name}, {format_bytes(total)}"
    where = f"{format_bytes(free)} free in {repository.cache}"
    if total > free:
        raise InputError(
            f"the download of {what} does not fit: {where}",
            f"{format_bytes(total)} of free disk space in the Hub cache",
            "free some space (`hf cache ls` lists what is cached), or set HF_HUB_CACHE to a folder on a larger disk",
        )

    def fetch(file: str) -> None:
        _retry(lambda: huggingface_hub.hf_hub_download(name, file, revision=repository.commit))

    megabytes = max(1, round(total / 1e6))
    with StepProgress(options.progress, megabytes, 0, "downloading") as progress, _hide_library_bars():
        version = f"{options.revision or constants.DEFAULT_REVISION}, commit {repository.commit[:12]}"
        if missing:
            variant = f", {options.variant}" if options.variant else ""
            progress.print_line(f"downloading {what} ({version}{variant}); {where}")
        blobs, start_time = repository.folder / "blobs", time.monotonic()
        bytes_before = _stored_bytes(blobs)
        for _ in _run_threads(files, fetch):
            done = min(_stored_bytes(blobs) - bytes_before, total)
            speed = f"MB  {format_bytes(done / max(time.monotonic() - start_time, 0.1))}/s"
            progress.update(min(megabytes, round(done / 1e6)), speed, {"bytes": done, "total_bytes": total})
        progress.update(megabytes, speed, {"bytes": total, "total_bytes": total})


def _run_threads(files: Sequence[str], work: Callable[[str], None]) -> Iterator[None]:
    """Call `work` for each file on daemon threads, yielding now and then; raise the first error.

    A thread pool would make Ctrl+C wait until the current files, of many gigabytes, are complete.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)

    def run() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                file = waiting.get_nowait()
                try:
                    work(file)
                    outcomes.put(None)
                except (NETWORK_ERROR, OSError, ValueError, RuntimeError) as error:
                    outcomes.put(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(NUM_THREADS, len(files)))]
    for thread in threads:
        thread.start()
    num_left = len(files)
    while num_left and (not outcomes.empty() or any(thread.is_alive() for thread in threads)):
        with contextlib.suppress(queue.Empty):
            error = outcomes.get(timeout=_POLL_S)
            num_left -= 1
            if error is not None:
                while not waiting.empty():  # the other threads stop after their current file
                    with contextlib.suppress(queue.Empty):
                        waiting.get_nowait()
                raise error
        yield
    assert num_left == 0, "a download thread died"


def _publish_view(repository: _Repository, files: Sequence[str]) -> Path:
    """Link the selected files into a folder of their own; its record is written last."""
    view = repository.view
    for file in files:
        link = view / file
        link.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(os.path.realpath(repository.snapshot / file), link.parent.resolve())
        if not (link.is_symlink() and os.readlink(link) == target):
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    facts = {"name": repository.name, "commit": repository.commit, "files": list(files)}
    runs.write_json_atomic(view / HUB_FILE, facts)
    return view


def _is_complete(view: Path) -> bool:
    try:
        return all((view / file).exists() for file in json.loads((view / HUB_FILE).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _open_cached(repository: _Repository, why: str, error: BaseException | None = None) -> Path:
    """Return the model from the cache, without asking the Hub; raise if it is not there."""
    options, name = repository.options, repository.name
    commit = repository.commit
    if not commit:
        reference = repository.folder / "refs" / (options.revision or constants.DEFAULT_REVISION)
        commit = reference.read_text().strip() if reference.is_file() else ""
    repository = replace(repository, commit=commit)
    index_file, is_new = repository.snapshot / INDEX_FILE, not (repository.view / HUB_FILE).exists()
    if commit and is_new and index_file.exists():  # another program downloaded it
        found = (path for path in repository.snapshot.rglob("*") if path.is_symlink() or path.is_file())
        names = [path.relative_to(repository.snapshot).as_posix() for path in found]
        index = input_files.read_json(index_file)
        files = select_files(names, index, options.variant, name)
        components = [key for key, value in index.items() if isinstance(value, list) and value[:1] not in ([], [None])]
        has_all = all(any(file.startswith(f"{key}/") for file in files) for key in components if key != "_class_name")
        if has_all and all((repository.snapshot / file).exists() for file in files):
            _publish_view(repository, files)
    if commit and _is_complete(repository.view):
        if error is not None:
            log.warning("the Hub cannot be reached (%s): using commit %s of %s from the cache", why, commit[:12], name)
        return repository.view
    at = f" at {options.revision}" if options.revision else ""
    names = sorted(path.name.removeprefix("models--").replace("--", "/") for path in repository.cache.glob("models--*"))
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    listed = f"which has {', '.join(names[:_NUM_SHOWN])}{more}" if names else "which is empty"
    there = "only a part of it is" if repository.snapshot.is_dir() and commit else "it is not"
    raise InputError(
        f"{name}{at} cannot be downloaded, because {why}, and {there} in the Hub cache {repository.cache}",
        f"the network, or the complete model in the cache, {listed}",
        f"unset HF_HUB_OFFLINE, or run `hf download {name}` where there is a network and copy the cache"
        if error is None
        else _advice(_status(error)),
    ) from error


# -- cache, disk and retries


@contextlib.contextmanager
def _lock(repository: _Repository) -> Iterator[None]:
    """Let one process at a time download a model; the others then find it in the cache."""
    file = repository.cache / ".locks" / repository.folder.name / "halation.lock"
    lock = filelock.FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        log.info("waiting for another process that downloads %s", repository.name)
        lock.acquire()
    except OSError as error:
        if error.errno not in PERMISSION_ERRNOS + RESOURCE_ERRNOS or not repository.snapshot.is_dir():
            raise
        yield  # a complete model in a cache that is shared and read-only
        return
    try:
        yield
    finally:
        lock.release()


def _remove_orphans(repository: _Repository) -> None:
    """Remove the partial files of killed downloads, which huggingface_hub does not continue."""
    for path in (repository.folder / "blobs").glob("*.*.incomplete"):
        with contextlib.suppress(OSError, filelock.Timeout):
            if time.time() - path.stat().st_mtime > ORPHAN_AGE_S:
                lock = repository.cache / ".locks" / repository.folder.name / f"{path.name.split('.')[0]}.lock"
                with filelock.FileLock(lock, timeout=0):
                    path.unlink()


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _stored_bytes(blobs: Path) -> int:
    """Return the size of all complete and partial files of a repository."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(blobs) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat().st_size
    return total


@contextlib.contextmanager
def _hide_library_bars() -> Iterator[None]:
    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            enable_progress_bars()


def format_bytes(num: float) -> str:
    """Format a size in decimal units, as the pages of the Hub do."""
    for unit in ("B", "kB", "MB", "GB"):
        if num < 999.5:
            return f"{num:.0f} {unit}" if unit == "B" or num >= 99.5 else f"{num:.1f} {unit}"
        num /= 1000
    return f"{num:.1f} TB"


def _retry(call: Callable[[], T]) -> T:
    """Call again after a rate limit, a failure of the server or of the network, a bounded number of times."""
    tries, wait_s = 0, 1.0
    while True:
        tries += 1
        try:
            return call()
        except (NETWORK_ERROR, OSError) as error:
            status = _status(error)
            is_temporary = status in (429, 500, 502, 503, 504) or (status is None and _is_network_error(error))
            if not is_temporary or tries >= (MAX_TRIES if status else MAX_NETWORK_TRIES):
                raise
            response = getattr(_root_error(error), "response", None)
            asked = "" if response is None else response.headers.get("Retry-After", "")
            pause_s = min(float(asked) if asked.isdigit() else wait_s, MAX_WAIT_S)
            log.info("the Hub failed (%s); trying again in %.0f s", _reason(error), pause_s)
        time.sleep(pause_s)
        wait_s *= 2


# -- errors


def _root_error(error: BaseException) -> BaseException:
    """Return the error of the Hub or the network that huggingface_hub wrapped."""
    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    response = getattr(_root_error(error), "response", None)
    return None if response is None else int(response.status_code)


def _is_network_error(error: BaseException) -> bool:
    root = _root_error(error)
    truncated = isinstance(root, OSError) and "Consistency check failed" in str(root)
    return truncated or (isinstance(root, (NETWORK_ERROR, ConnectionError)) and _status(root) is None)


def _reason(error: BaseException) -> str:
    """Describe an error in a few words: its status, or the first line of its text."""
    root, status = _root_error(error), _status(error)
    if status is not None:
        return {429: "429 Too Many Requests"}.get(status, f"status {status}")
    lines = [line for line in str(root).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(root).__name__


@contextlib.contextmanager
def _explain_errors(repository: _Repository) -> Iterator[None]:
    try:
        yield
    except input_files.RefusedFileError as error:
        raise error.as_input_error() from error
    except (NETWORK_ERROR, OSError, ValueError, RuntimeError) as error:
        revision = repository.options.revision or ""
        raise hub_error(error, repository.name, f"--{repository.flag}", revision) from error


def hub_error(error: BaseException, name: str, flag: str, revision: str = "") -> InputError:
    """Return the message for an error of huggingface_hub: found, expected, what to do.

    It never contains the token or a signed address.
    """
    root, page = _root_error(error), f"{constants.ENDPOINT}/{name}"
    has_token = bool(huggingface_hub.get_token())
    log_in = "run `hf auth login`, or set HF_TOKEN"
    if isinstance(root, errors.GatedRepoError):
        who = "the account of this token has no access yet" if has_token else "this machine is not logged in"
        action = f"accept the terms on {page}, then {'' if has_token else f'{log_in}, and '}run the same command again"
        if has_token:
            action += " (a fine-grained token also needs the permission to read gated repositories)"
        return InputError(
            f"{name} is gated: its files are given only to accounts that accepted its terms, and {who}",
            "a token of an account with access to this model",
            action,
        )
    if isinstance(root, errors.RevisionNotFoundError):
        return _revision_error(name, revision)
    if isinstance(root, errors.RepositoryNotFoundError):
        who = "the account of this token has no access to it" if has_token else "this machine is not logged in"
        return InputError(
            f"the Hub has no model {name}, or it is private and {who}",
            "the name of a model on the Hub, as owner/name",
            f"check the spelling of {flag}; for a private model, "
            + ("use the token of an account with access (`hf auth login`, HF_TOKEN)" if has_token else log_in),
        )
    status = _status(root)
    if status == 401:
        return InputError(
            f"the Hub does not accept the token of this machine (401) for {name}",
            "a valid token, or none for a public model",
            "run `hf auth login` again, or correct or unset HF_TOKEN",
        )
    if isinstance(root, OSError) and root.errno in RESOURCE_ERRNOS + PERMISSION_ERRNOS:
        return InputError(
            f"writing {name} to the Hub cache {constants.HF_HUB_CACHE} failed: {root.strerror}",
            "a cache folder with enough space that can be written",
            "free some space or set HF_HUB_CACHE to another folder, then run the same command again: complete files "
            "are kept",
        )
    if status == 403:
        return InputError(
            f"the Hub refuses to give {name} (403)",
            "a token with access to this model",
            f"look at {page}: the token may lack a permission, or the model was disabled",
        )
    return InputError(
        f"downloading {name} from the Hub failed: {_reason(root)}", "a connection to the Hub", _advice(status)
    )


def _advice(status: int | None) -> str:
    if status == 429:
        return (
            "wait a few minutes and run the same command again; a logged-in account has higher limits "
            "(`hf auth login`, HF_TOKEN)"
        )
    what = "the status of the Hub" if status else "the network, proxy settings and HF_ENDPOINT"
    return f"check {what}, then run the same command again: complete files are kept"


def _revision_error(name: str, revision: str) -> InputError:
    known: list[str] = []
    with contextlib.suppress(NETWORK_ERROR, OSError):
        refs = huggingface_hub.HfApi().list_repo_refs(name)
        known = [ref.name for ref in (*refs.branches, *refs.tags)]
    near = difflib.get_close_matches(revision, known, n=_NUM_SHOWN) or known[:_NUM_SHOWN]
    return InputError(
        f"--revision {revision}: {name} on the Hub has no such branch, tag or commit",
        f"one of its branches and tags, such as {', '.join(near)}" if near else "a branch, a tag or a commit hash",
        f"check --revision; {constants.ENDPOINT}/{name}/commits/main lists the commits",
    )
