"""Weight files of feature extractors: download, hash check, safe loading."""

from __future__ import annotations

import hashlib
import http.client
import io
import logging
import os
import pickle
import pickletools
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor

from halation import input_files
from halation.errors import InputError
from halation.logging_setup import ON_CONSOLE
from halation.runs.run_folder import cache_folder, open_atomic

logger = logging.getLogger(__name__)
FID_NAME = "pt_inception-2015-12-05-6726825d.pth"
FID_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{FID_NAME}"
FID_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_BLOCK_BYTES = 1 << 20
_NUM_OLD_PICKLES = 5
"""Pickles in a file from before torch 1.6: magic number, version, machine, tensors, storage keys."""
_READ_TIMEOUT_S = 60.0
_LOG_INTERVAL_S = 5.0


def fetch_fid_weights(flag: str = "--weights") -> Path:
    """Return the Inception weights of FID in the user's cache.

    They are downloaded the first time; the hash is checked every time.
    """
    return fetch_file(FID_URL, cache_folder() / FID_NAME, FID_SHA256, flag)


def fetch_file(url: str, file: Path, sha256: str, flag: str = "--weights") -> Path:
    """Return `file`, downloaded from `url` if missing; raise InputError if its hash differs."""
    if not file.is_file():
        if is_offline():
            raise _download_error(url, file, sha256, flag, "HF_HUB_OFFLINE is set")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot create the cache folder {file.parent}: {error.strerror or error}",
                "a folder that can be created and written",
                f"set HALATION_CACHE to such a folder, or pass {flag} FILE",
            ) from error
        # Ranks that start together take turns; all but the first find the file.
        with FileLock(file.with_name(f".{file.name}.lock")):
            if not file.is_file():
                for leftover in file.parent.glob(f".{file.name}.*.tmp"):  # of a killed download
                    leftover.unlink(missing_ok=True)
                _download(url, file, sha256, flag)
    digest = input_files.file_sha256(file)
    if digest != sha256:
        raise InputError(
            f"{file} has the SHA-256 {digest}",
            f"{sha256}, the hash of {url}",
            f"remove it to download it again, or pass your own file by {flag} FILE",
        )
    return file


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _download_error(url: str, file: Path, sha256: str, flag: str, why: str) -> InputError:
    return InputError(
        f"{file} is missing and cannot be downloaded: {why}",
        f"the file of {url} (SHA-256 {sha256})",
        f"download it elsewhere and copy it to {file}, or pass its path by {flag} FILE",
    )


def _download(url: str, file: Path, sha256: str, flag: str) -> None:
    logger.info("downloading %s to %s", url, file, extra=ON_CONSOLE)
    try:
        with urllib.request.urlopen(url, timeout=_READ_TIMEOUT_S) as response, open_atomic(file, "weights") as target:
            found, num_bytes = _copy_response(response, target)
            content_length = response.headers.get("Content-Length")
            if content_length is not None and num_bytes != int(content_length):
                raise _download_error(
                    url, file, sha256, flag, f"the connection ended after {num_bytes} of {content_length} bytes"
                )
            if found != sha256:
                raise InputError(
                    f"{url} returned {num_bytes} bytes with the SHA-256 {found}",
                    sha256,
                    f"try again; if it fails again, download the file elsewhere and copy it to {file}, "
                    f"or pass its path by {flag} FILE",
                )
    except urllib.error.HTTPError as error:
        with error:  # the error is also the response, with an open connection
            raise _download_error(url, file, sha256, flag, f"{error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _download_error(url, file, sha256, flag, str(error.reason)) from error
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise _download_error(url, file, sha256, flag, f"{type(error).__name__}: {error}") from error


def _copy_response(response: http.client.HTTPResponse, target: BinaryIO) -> tuple[str, int]:
    digest = hashlib.sha256()
    total = int(response.headers.get("Content-Length") or 0)
    num_bytes, last_log_s = 0, time.monotonic()
    while block := response.read(_BLOCK_BYTES):
        digest.update(block)
        target.write(block)
        num_bytes += len(block)
        if time.monotonic() - last_log_s > _LOG_INTERVAL_S:
            last_log_s = time.monotonic()
            share = f" of {total / 1e6:.0f}" if total else ""
            logger.info("downloaded %.0f%s MB", num_bytes / 1e6, share, extra=ON_CONSOLE)
    return digest.hexdigest(), num_bytes


def _check_pickles(file: Path) -> None:
    """Raise for a .pth file that may use more memory than its size.

    These are files with compressed members, and with bytearrays that are given by their length.
    """
    max_bytes = input_files.limit(input_files.MAX_PICKLE_BYTES)
    with input_files.open_regular_file(file) as stream:
        if not zipfile.is_zipfile(stream):
            stream.seek(0)
            data = stream.read(max_bytes)
            try:
                return _scan_pickles(data, _NUM_OLD_PICKLES)
            except ValueError:  # torch reports it better, unless only a part of the file was scanned
                if len(data) < max_bytes:
                    return None
                raise
        input_files.check_zip_directory(stream)
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("a zip file with compressed members, which torch.save does not write")
            for member in members:
                if member.filename.endswith(".pkl"):
                    if member.file_size > max_bytes:
                        raise ValueError(
                            f"{member.filename} is too large ({input_files.format_size(member.file_size)})"
                        )
                    _scan_pickles(archive.read(member), 1)
    return None


def _scan_pickles(data: bytes, number: int) -> None:
    stream = io.BytesIO(data)
    for _ in range(number):
        for opcode, value, _place in pickletools.genops(stream):
            if "bytearray" in opcode.name.lower() or (isinstance(value, str) and "bytearray" in value):
                raise pickle.UnpicklingError("a bytearray, which tensors do not use")


def read_state_dict(file: Path, flag: str = "--weights") -> Mapping[str, Tensor]:
    """Read a state dict from safetensors or torch.save; code in a pickle is never run."""
    if not file.is_file():
        raise InputError(f"{file} is not a file", "weights as .safetensors or .pth", f"check {flag}")
    try:
        if file.suffix == ".safetensors":
            input_files.read_safetensors_header(file)
            return load_file(str(file))
        _check_pickles(file)
        # Files from before torch 1.6, like the released weights, are not zip archives and cannot be memory-mapped.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{file} holds more than tensors, or is damaged: {str(error).splitlines()[0]}",
            "a state dict of torch.save, or .safetensors; code in a file is never run",
            "download the file again from its publisher, or convert it to safetensors if you trust it",
        ) from error
    except input_files.RefusedFileError as error:
        raise error.as_input_error() from error
    except Exception as error:
        raise InputError(
            f"{file} cannot be read: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "complete weights as .safetensors or .pth",
            "copy the file again",
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InputError(f"{file} is not a state dict", "tensors by name", "give the file of the network's weights")
    return tensors
