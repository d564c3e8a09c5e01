"""Models of the Hub, downloaded from a local server that speaks its protocol."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from halation.models.hub_download import select_files
from support import tiny_models
from support.commands import halation, started, until

INDEX = "model_index.json"
TOKEN = "hf_secret0123456789"


@dataclass
class Repository:
    """A model on the fake hub: its commits, the newest last, and the branches and tags that point to them."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    private: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes to report instead of the true ones."""

    def push(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files and let a branch point to it; return its hash."""
        commit = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[branch] = commit
        return commit


@dataclass
class Fault:
    """What the server does instead of an answer, `times` times, to requests whose line matches `pattern`."""

    pattern: str
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    truncate: int = -1
    """Send only this many bytes of the body, and close the connection."""
    hold: bool = False
    """Send half of the body and wait until `FakeHub.release` is set."""
    times: int = 1


class FakeHub(ThreadingHTTPServer):
    """The part of the Hub that huggingface_hub needs to download a model, with faults on demand."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.release = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, name: str, files: Mapping[str, bytes], **settings: Any) -> Repository:
        self.repositories[name] = Repository(commits={}, refs={}, **settings)
        self.repositories[name].push(files)
        return self.repositories[name]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed close their connections; that is what some tests are about."""

    def downloaded(self) -> list[str]:
        """Return the files of which a body was requested, in the order of the requests."""
        return [line.split("/cdn/")[1].split(" ")[0] for line in self.requests if line.startswith("GET /cdn/")]

    def environment(self, home: Path, **changes: str) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        own |= {"HF_ENDPOINT": self.url, "HF_HOME": str(home / "hf"), "HALATION_CACHE": str(home / "cache")}
        return (
            own
            | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", "HF_HUB_DISABLE_TELEMETRY": "1"}
            | changes
        )

    def python(self, code: str, home: Path, **environment: str) -> str:
        """Run code in a new process that talks to this hub, and return its standard output."""
        done = subprocess.run(
            [sys.executable, "-c", _PRELUDE + code],
            env=self.environment(home, **environment),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr, "a token is never printed"
        return done.stdout

    def resolve(self, home: Path, *names: str, flags: Mapping[str, Any] | None = None, **environment: str) -> list[Any]:
        """Resolve models in one new process: for each the folder's path, or the three parts of the message."""
        code = f"answer({list(names)!r}, {dict(flags or {})!r})"
        return json.loads(self.python(code, home, **environment).splitlines()[-1])


_PRELUDE = """
import json, sys
from pathlib import Path
from halation.errors import InputError
from halation.models.model_folder import HubOptions
from halation.models.hub_download import download_model

def answer(names, flags):
    answers = []
    for name in names:
        try:
            answers.append(str(download_model(name, HubOptions(**flags), "model_path")))
        except InputError as error:
            answers.append([error.found, error.expected, error.action])
    assert "torch" not in sys.modules, "the parent of the ranks does not import torch"
    print(json.dumps(answers))

"""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *_words: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        line = f"{self.command} {unquote(self.path)} {self.headers.get('Range', '')}".strip()
        self.server.requests.append(line)
        fault = next((each for each in self.server.faults if each.times and re.search(each.pattern, line)), None)
        if fault is not None:
            fault.times -= 1
            if fault.status:
                self.send(fault.status, fault.headers)
                return
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.answer_api("/".join(parts[2:4]), parts[4:])
        elif parts[0] == "cdn":
            assert "Authorization" not in self.headers, "the token is for the Hub alone"
            repository = self.server.repositories["/".join(parts[1:3])]
            self.send_file(repository.commits[parts[3]]["/".join(parts[4:])], fault)
        elif len(parts) > 4 and parts[2] == "resolve":
            self.redirect_to_cdn("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.send(404, {})

    def answer_api(self, name: str, rest: Sequence[str]) -> None:
        repository = self.find(name)
        if repository is None:
            return
        if rest == ["refs"]:
            branches = [{"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": commit} for ref, commit in
                        repository.refs.items()]  # fmt: skip
            self.send_json({"branches": branches, "converts": [], "tags": []})
            return
        revision = rest[1] if rest and rest[0] in ("revision", "tree") else "main"
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self.send(404, {"X-Error-Code": "RevisionNotFound"})
            return
        if rest and rest[0] == "tree":
            entries = repository.commits[commit].items()
            self.send_json(
                [{"type": "file", "path": file, "size": len(data), "oid": etag(data)[:40]} for file, data in entries]
            )
            return
        siblings = [
            {
                "rfilename": file,
                "size": repository.sizes.get(file, len(data)),
                "blobId": hashlib.sha1(data).hexdigest(),
                "lfs": {"sha256": etag(data), "size": len(data), "pointerSize": 130},
            }
            for file, data in repository.commits[commit].items()
        ]
        self.send_json({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": [], "private": False})

    def redirect_to_cdn(self, name: str, revision: str, file: str) -> None:
        """The Hub answers with the hash, and sends large files from another host; here, from another path."""
        repository = self.find(name)
        if repository is None:
            return
        if repository.gated and f"Bearer {TOKEN}-accepted" != self.headers.get("Authorization"):
            status = 403 if self.headers.get("Authorization") else 401
            self.send(status, {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {name} is restricted"})
            return
        commit = repository.refs.get(revision, revision)
        if file not in repository.commits.get(commit, {}):
            self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        data = repository.commits[commit][file]
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{etag(data)}"', "X-Repo-Commit": commit}
        # Another name of this machine is another host, to which a client must not send its token.
        cdn = self.server.url.replace("127.0.0.1", "localhost")
        self.send(302, {"Location": f"{cdn}/cdn/{name}/{commit}/{file}", **linked})

    def find(self, name: str) -> Repository | None:
        repository = self.server.repositories.get(name)
        token = self.headers.get("Authorization", "")
        if token == "Bearer wrong":
            self.send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository is None or (repository.private and not token.endswith("-accepted")):
            self.send(404 if token else 401, {"X-Error-Code": "RepoNotFound"})
        else:
            return repository
        return None

    def send_file(self, data: bytes, fault: Fault | None) -> None:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(match[1]) if match else 0
        body = data[first:]
        self.send_response(206 if match else 200)
        self.send_header("Content-Length", str(len(body)))
        if match:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.hold:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.release.wait(120)
            self.close_connection = True
        elif fault is not None and fault.truncate >= 0:
            self.wfile.write(body[: fault.truncate])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def send_json(self, value: object) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.release.set()
        server.shutdown()


def pipeline_index(kind: str, **components: str) -> bytes:
    """A model_index.json; a component's value is `library.Class`."""
    listed = {name: value.split(".") for name, value in components.items()}
    return json.dumps({"_class_name": kind, "_diffusers_version": "0.30.0", **listed}).encode()


def small_files(**more: bytes) -> dict[str, bytes]:
    """A repository with one component, and what else a repository may hold."""
    files = {
        INDEX: pipeline_index("FluxPipeline", transformer="diffusers.FluxTransformer2DModel"),
        "transformer/config.json": b"{}",
        "transformer/diffusion_pytorch_model.safetensors": b"weights" * 1000,
        "transformer/diffusion_pytorch_model.fp16.safetensors": b"halves" * 500,
        "flux1-dev.safetensors": b"twin" * 5000,
        "README.md": b"words",
    }
    return files | {name.replace("__", "/"): data for name, data in more.items()}


def relative_files(folder: str | Path) -> set[str]:
    hidden = (".hub.json",)
    paths = (path for path in Path(folder).rglob("*") if path.is_file() and path.name not in hidden)
    return {path.relative_to(folder).as_posix() for path in paths}


# -- which files

ENCODER, CLIP = "transformers.T5EncoderModel", "transformers.CLIPTextModel"
SHARDS = [f"diffusion_pytorch_model-0000{n}-of-00002" for n in (1, 2)]
FLUX = pipeline_index(
    "FluxPipeline", scheduler="diffusers.FlowMatchEulerDiscreteScheduler", text_encoder=CLIP, text_encoder_2=ENCODER,
    tokenizer="transformers.CLIPTokenizer", tokenizer_2="transformers.T5TokenizerFast",
    transformer="diffusers.FluxTransformer2DModel", vae="diffusers.AutoencoderKL",
)  # fmt: skip
FLUX_FILES = """
.gitattributes LICENSE.md README.md dev_grid.jpg ae.safetensors flux1-dev.safetensors model_index.json
scheduler/scheduler_config.json text_encoder/config.json text_encoder/model.safetensors text_encoder_2/config.json
text_encoder_2/model-00001-of-00002.safetensors text_encoder_2/model-00002-of-00002.safetensors
text_encoder_2/model.safetensors.index.json tokenizer/merges.txt tokenizer/special_tokens_map.json
tokenizer/tokenizer_config.json tokenizer/vocab.json tokenizer_2/special_tokens_map.json tokenizer_2/spiece.model
tokenizer_2/tokenizer.json tokenizer_2/tokenizer_config.json transformer/config.json
transformer/diffusion_pytorch_model-00001-of-00002.safetensors
transformer/diffusion_pytorch_model-00002-of-00002.safetensors
transformer/diffusion_pytorch_model.safetensors.index.json vae/config.json
vae/diffusion_pytorch_model.safetensors""".split()  # noqa: SIM905
SDXL = pipeline_index(
    "StableDiffusionXLPipeline", scheduler="diffusers.EulerDiscreteScheduler", text_encoder=CLIP,
    text_encoder_2="transformers.CLIPTextModelWithProjection", tokenizer="transformers.CLIPTokenizer",
    tokenizer_2="transformers.CLIPTokenizer", unet="diffusers.UNet2DConditionModel", vae="diffusers.AutoencoderKL",
)  # fmt: skip
SDXL_FILES = """
model_index.json sd_xl_base_1.0.safetensors sd_xl_base_1.0_0.9vae.safetensors sd_xl_offset_example-lora_1.0.safetensors
scheduler/scheduler_config.json text_encoder/config.json text_encoder/flax_model.msgpack
text_encoder/model.fp16.safetensors text_encoder/model.onnx text_encoder/model.safetensors
text_encoder/openvino_model.bin text_encoder/openvino_model.xml text_encoder_2/config.json
text_encoder_2/model.fp16.safetensors text_encoder_2/model.onnx_data text_encoder_2/model.safetensors
tokenizer/merges.txt tokenizer/vocab.json tokenizer_2/vocab.json unet/config.json
unet/diffusion_flax_model.msgpack unet/diffusion_pytorch_model.fp16.safetensors
unet/diffusion_pytorch_model.safetensors unet/model.onnx unet/model.onnx_data vae/config.json
vae/diffusion_pytorch_model.fp16.safetensors vae/diffusion_pytorch_model.safetensors vae_decoder/config.json
vae_decoder/model.onnx vae_1_0/config.json vae_1_0/diffusion_pytorch_model.safetensors""".split()  # noqa: SIM905
SD3 = pipeline_index(
    "StableDiffusion3Pipeline", scheduler="diffusers.FlowMatchEulerDiscreteScheduler",
    text_encoder="transformers.CLIPTextModelWithProjection", text_encoder_3=ENCODER,
    tokenizer="transformers.CLIPTokenizer", tokenizer_3="transformers.T5TokenizerFast",
    transformer="diffusers.SD3Transformer2DModel", vae="diffusers.AutoencoderKL",
)  # fmt: skip
SD3_FILES = [
    *f"""{INDEX} sd3.5_large.safetensors text_encoders/t5xxl_fp16.safetensors text_encoders/clip_g.safetensors
    scheduler/scheduler_config.json text_encoder/config.json text_encoder/model.safetensors
    text_encoder/model.fp16.safetensors text_encoder_3/config.json text_encoder_3/model-00001-of-00002.safetensors
    text_encoder_3/model-00002-of-00002.safetensors text_encoder_3/model.fp16-00001-of-00002.safetensors
    text_encoder_3/model.fp16-00002-of-00002.safetensors text_encoder_3/model.safetensors.index.json
    text_encoder_3/model.safetensors.index.fp16.json tokenizer/vocab.json tokenizer_3/spiece.model
    transformer/config.json transformer/diffusion_pytorch_model.safetensors.index.json vae/config.json
    vae/diffusion_pytorch_model.safetensors SD3.5L_example_workflow.json""".split(),
    *(f"transformer/{shard}.safetensors" for shard in SHARDS),
]
SD15 = pipeline_index(
    "StableDiffusionPipeline", scheduler="diffusers.PNDMScheduler", text_encoder=CLIP,
    tokenizer="transformers.CLIPTokenizer", unet="diffusers.UNet2DConditionModel", vae="diffusers.AutoencoderKL",
    feature_extractor="transformers.CLIPImageProcessor", safety_checker="stable_diffusion.StableDiffusionSafetyChecker",
)  # fmt: skip
SD15_FILES = """
model_index.json v1-5-pruned.ckpt v1-5-pruned-emaonly.safetensors v1-inference.yaml
feature_extractor/preprocessor_config.json safety_checker/config.json safety_checker/model.fp16.safetensors
safety_checker/model.safetensors safety_checker/pytorch_model.bin safety_checker/pytorch_model.fp16.bin
scheduler/scheduler_config.json text_encoder/config.json text_encoder/model.safetensors
text_encoder/model.fp16.safetensors text_encoder/pytorch_model.bin tokenizer/merges.txt tokenizer/vocab.json
unet/config.json unet/diffusion_pytorch_model.bin unet/diffusion_pytorch_model.fp16.bin
unet/diffusion_pytorch_model.non_ema.safetensors unet/diffusion_pytorch_model.fp16.safetensors
unet/diffusion_pytorch_model.safetensors vae/config.json vae/diffusion_pytorch_model.safetensors
vae/diffusion_pytorch_model.bin""".split()  # noqa: SIM905
MIXED_FILES = """
model_index.json config.json tokenizer.json pipeline.py scheduler/scheduler_config.json scheduler/notes.py
text_encoder/config.json text_encoder/model.safetensors tokenizer/vocab.json tokenizer/sub/more.json
tokenizer/weights.pkl unet/config.json unet/diffusion_pytorch_model-00001-of-00002.fp16.safetensors
unet/diffusion_pytorch_model-00002-of-00002.fp16.safetensors unet/diffusion_pytorch_model.safetensors
unet/diffusion_pytorch_model.safetensors.fp16.index.json vae/config.json
vae/diffusion_pytorch_model.safetensors feature_extractor/preprocessor_config.json""".split()  # noqa: SIM905
LISTINGS = {
    "a/flux": (FLUX, FLUX_FILES, (None,)),
    "a/sdxl": (SDXL, SDXL_FILES, (None, "fp16")),
    "a/sd3": (SD3, SD3_FILES, (None, "fp16")),
    "a/sd15": (SD15, SD15_FILES, (None, "fp16", "non_ema")),
    "a/mixed": (SD15, MIXED_FILES, (None, "fp16")),
}


def test_a_pipeline_is_downloaded_without_twins_of_its_weights() -> None:
    twins = {"ae.safetensors", "flux1-dev.safetensors", ".gitattributes", "LICENSE.md", "README.md", "dev_grid.jpg"}
    assert set(select_files(FLUX_FILES, json.loads(FLUX), None, "a/flux")) == set(FLUX_FILES) - twins
    halves = select_files(SDXL_FILES, json.loads(SDXL), "fp16", "a/sdxl")
    folders = ("text_encoder", "text_encoder_2", "unet", "vae")
    names = {"text_encoder": "model", "text_encoder_2": "model"}
    own = "vae_1_0/diffusion_pytorch_model.safetensors"  # diffusers takes the weights of every folder
    weights = {
        own,
        *(f"{folder}/{names.get(folder, 'diffusion_pytorch_model')}.fp16.safetensors" for folder in folders),
    }
    assert {file for file in halves if file.endswith(".safetensors")} == weights
    assert set(halves) - weights == {
        *(INDEX, "scheduler/scheduler_config.json", *(f"{folder}/config.json" for folder in folders)),
        *("tokenizer/merges.txt", "tokenizer/vocab.json", "tokenizer_2/vocab.json"),
    }


@pytest.mark.slow
def test_the_files_are_those_that_diffusers_downloads_without_code_and_pickles(hub: FakeHub, tmp_path: Path) -> None:
    for name, (index, files, _) in LISTINGS.items():
        hub.add(name, {file: index if file == INDEX else file.encode() for file in files})
    asked = {name: list(variants) for name, (_, _, variants) in LISTINGS.items()}
    code = f"""
import logging, tempfile
from diffusers import DiffusionPipeline
logging.disable(logging.WARNING)
def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
out = []
for name, variants in {asked!r}.items():
    for variant in variants:
        theirs = DiffusionPipeline.download(
            name, variant=variant, use_safetensors=True, cache_dir=tempfile.mkdtemp(dir={str(tmp_path)!r}))
        ours = download_model(name, HubOptions(variant=variant, progress="none"), "model_path")
        out.append([name, variant, files(theirs), files(ours)])
print(json.dumps(out))
"""
    answers = json.loads(hub.python(code, tmp_path).splitlines()[-1])
    assert len(answers) == 10
    for name, variant, theirs, ours in answers:
        safe = {file for file in theirs if not file.endswith((".py", ".pkl", ".ckpt", ".bin"))}
        assert set(ours) - {".hub.json"} == safe, (name, variant)
        assert not any("/" not in file and file.endswith(".safetensors") for file in ours), "no twins in a single file"
    chosen = {(name, variant): ours for name, variant, _, ours in answers}
    assert "unet/diffusion_pytorch_model.fp16.safetensors" in chosen["a/sdxl", "fp16"]
    assert "unet/diffusion_pytorch_model.safetensors" not in chosen["a/sdxl", "fp16"]
    assert "vae/diffusion_pytorch_model.safetensors" in chosen["a/sd15", "fp16"], "it has no such variant"


def test_repositories_that_cannot_be_used_are_refused_before_the_download(hub: FakeHub, tmp_path: Path) -> None:
    weights = "transformer/diffusion_pytorch_model"
    hub.add("a/pickles", {INDEX: small_files()[INDEX], f"{weights}.bin": b"x"})
    hub.add("a/halves", {INDEX: small_files()[INDEX], f"{weights}.fp16.safetensors": b"x"})
    hub.add("a/code", small_files() | {INDEX: json.dumps({"_class_name": ["pipe", "Pipe"]}).encode()})
    own = {INDEX: pipeline_index("FluxPipeline", transformer="own_model.Model"), "transformer/own_model.py": b"x"}
    hub.add("a/own", small_files() | own)
    hub.add("a/plain", {INDEX: small_files()[INDEX], f"{weights}.safetensors": b"x"})
    hub.add("a/large", small_files(), sizes={f"{weights}.safetensors": 10**18})
    before = hub.resolve(tmp_path, "a/pickles", "a/halves", "a/code", "a/own", "a/large")
    assert "a/pickles on the Hub has the weights of transformer only as diffusion_pytorch_model.bin" in before[0][0]
    assert "only the variants fp16" in before[1][0]
    assert before[1][2] == "give --variant fp16"
    assert "needs code that comes with the model (['pipe', 'Pipe'])" in before[2][0]
    assert "needs code that comes with the model (transformer/own_model.py)" in before[3][0]
    assert before[4][0].startswith("the download of 2 files of a/large, 1000000.0 TB does not fit: ")
    assert "HF_HUB_CACHE" in before[4][2]
    (variant,) = hub.resolve(tmp_path, "a/plain", flags={"variant": "fp16"})
    assert variant[1:] == ["no --variant: this model has only plain weights", "leave --variant out"]
    (variant,) = hub.resolve(tmp_path, "a/halves", flags={"variant": "bf16"})
    assert "has no bf16 or plain weights of transformer: it has only the variants fp16" in variant[0]
    assert not [file for file in hub.downloaded() if not file.endswith(INDEX)]


def test_a_file_name_that_leads_out_of_the_folder_is_ignored(hub: FakeHub, tmp_path: Path) -> None:
    index = pipeline_index("FluxPipeline", transformer="diffusers.Flux", tokenizer="transformers.CLIPTokenizer")
    outside = {f"tokenizer/{'../' * num}hub/evil.json": b"x" for num in range(1, 9)}
    hub.add("a/model", small_files() | outside | {INDEX: index, "tokenizer/vocab.json": b"{}", "/evil.json": b"x"})
    (folder,) = hub.resolve(tmp_path, "a/model")
    assert "tokenizer/vocab.json" in relative_files(folder)
    assert not list(tmp_path.rglob("evil.json"))


# -- accounts, names and revisions


def test_a_gated_model_is_answered_with_its_page_and_the_login(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("black-forest-labs/flux", small_files(), gated=True)
    ((found, _, action),) = hub.resolve(tmp_path, "black-forest-labs/flux")
    assert found.startswith("black-forest-labs/flux is gated:")
    assert "this machine is not logged in" in found
    assert f"accept the terms on {hub.url}/black-forest-labs/flux" in action
    assert "`hf auth login`" in action
    assert "HF_TOKEN" in action
    ((found, _, action),) = hub.resolve(tmp_path, "black-forest-labs/flux", HF_TOKEN=TOKEN)
    assert "the account of this token has no access yet" in found
    assert "accept the terms on" in action
    assert "fine-grained" in action
    (folder,) = hub.resolve(tmp_path, "black-forest-labs/flux", HF_TOKEN=f"{TOKEN}-accepted")
    assert relative_files(folder) == {
        INDEX, "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"
    }  # fmt: skip


def test_a_wrong_name_a_private_model_and_a_bad_token_have_their_messages(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("a/secret", small_files(), private=True)
    hub.add("a/single", {"flux1-dev.safetensors": b"x", "config.json": b"{}"})
    absent, secret = hub.resolve(tmp_path, "a/absent", "a/secret")
    for name, (found, expected, action) in (("a/absent", absent), ("a/secret", secret)):
        assert found == f"the Hub has no model {name}, or it is private and this machine is not logged in"
        assert expected == "the name of a model on the Hub, as owner/name"
        assert "check the spelling of --model_path" in action
        assert "hf auth login" in action
    ((found, _, _),) = hub.resolve(tmp_path, "a/secret", HF_TOKEN=TOKEN)
    assert "the account of this token has no access to it" in found
    ((found, _, action),) = hub.resolve(tmp_path, "a/secret", HF_TOKEN="wrong")
    assert "does not accept the token of this machine (401)" in found
    assert "unset HF_TOKEN" in action
    single = hub.python(
        "from halation.models.model_path_resolver import resolve_pipeline_folder\n"
        "try: resolve_pipeline_folder('a/single')\nexcept InputError as error: print(error)",
        tmp_path,
    )
    assert "a/single on the Hub is not a diffusers pipeline: it has no model_index.json" in single
    assert hub.downloaded() == []


def test_a_revision_that_does_not_exist_is_answered_with_near_ones(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("a/model", small_files()).push(small_files(), branch="refined")
    ((found, expected, _),) = hub.resolve(tmp_path, "a/model", flags={"revision": "refind"})
    assert found == "--revision refind: a/model on the Hub has no such branch, tag or commit"
    assert expected == "one of its branches and tags, such as refined"
    ((_, expected, _),) = hub.resolve(tmp_path, "a/model", flags={"revision": "0" * 40})
    assert expected == "one of its branches and tags, such as main, refined"


def test_a_local_model_with_a_revision_or_a_variant_is_refused(tmp_path: Path) -> None:
    from halation.config import check_settings
    from halation.errors import InputError
    from halation.evaluation.config import EvaluateConfig
    from halation.models.model_folder import HubOptions
    from halation.models.model_path_resolver import resolve_model, resolve_pipeline_folder
    from halation.training.config import TrainConfig

    for name in (str(tmp_path), "testcard", "streets-64"):
        with pytest.raises(InputError, match=r"--revision v1 with .*, which is not downloaded from the Hub"):
            resolve_model(name, raw=False, hub=HubOptions(revision="v1"))
    with pytest.raises(InputError, match="--variant fp16 with"):
        resolve_pipeline_folder(str(tmp_path), hub=HubOptions(variant="fp16"))
    with pytest.raises(InputError, match="--variant fp16 without --model_path"):
        check_settings(TrainConfig(variant="fp16"))
    with pytest.raises(InputError, match="--revision v1 without --model_path"):
        check_settings(EvaluateConfig(generated="x", revision="v1"))


# -- network


def test_failures_of_the_hub_and_the_network_are_retried_and_files_continue(hub: FakeHub, tmp_path: Path) -> None:
    """Rate limits, failures of the server, closed connections; a cut file continues where it was cut."""
    big, other = "transformer/diffusion_pytorch_model.safetensors", "transformer/config.json"
    weights = bytes(range(256)) * 50_000  # huggingface_hub writes blocks of 10 MiB
    hub.add("a/model", small_files() | {big: weights})
    hub.faults = [
        Fault("GET /api/models/a/model", status=429, headers={"Retry-After": "1"}),
        Fault("GET /api/models/a/model", status=503),
        Fault(f"GET /cdn/.*{big}", truncate=12_000_000),
        Fault(f"GET /cdn/.*{other}", status=500),
        Fault(f"HEAD /a/model/resolve/.*{other}", status=502),
    ]
    (folder,) = hub.resolve(tmp_path, "a/model")
    assert all(fault.times == 0 for fault in hub.faults)
    assert (Path(folder) / big).read_bytes() == weights
    assert [line for line in hub.requests if line.endswith(f"bytes={10 << 20}-")], "it did not begin again"


def test_a_hub_that_keeps_failing_is_reported_after_bounded_retries(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("limited", "broken"):
        hub.add(f"a/{name}", small_files())
    hub.faults = [
        Fault("GET /api/models/a/limited", status=429, headers={"Retry-After": "0"}, times=100),
        Fault("GET /cdn/a/broken/.*config.json", status=403, times=100),
    ]
    limited, broken = hub.resolve(tmp_path, "a/limited", "a/broken")
    assert "a/limited cannot be downloaded, because 429 Too Many Requests, and it is not in the Hub cache" in limited[0]
    assert "wait a few minutes" in limited[2]
    assert "hf auth login" in limited[2]
    assert sum("/a/limited" in line for line in hub.requests) <= 10
    assert broken[0] == "the Hub refuses to give a/broken (403)"
    assert "the token may lack a permission" in broken[2]


def test_without_a_network_the_cache_serves_what_is_complete(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("a/model", small_files())
    hub.add("a/other", small_files())
    (folder,) = hub.resolve(tmp_path, "a/model")
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    again, other = hub.resolve(tmp_path, "a/model", "a/other", **offline)
    assert again == folder
    assert "a/other cannot be downloaded, because HF_HUB_OFFLINE is set, and it is not in the Hub cache" in other[0]
    assert "in the cache, which has a/model" in other[1]
    assert "`hf download a/other`" in other[2]
    down = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    again, other = hub.resolve(tmp_path, "a/model", "a/other", **down)
    assert again == folder, "the branch was seen when it was downloaded"
    assert "a/other cannot be downloaded, because " in other[0]
    assert "check the network" in other[2]
    (Path(folder) / "transformer/config.json").resolve().unlink()
    ((found, _, _),) = hub.resolve(tmp_path, "a/model", **offline)
    assert "only a part of it is in the Hub cache" in found
    assert hub.resolve(tmp_path, "a/model") == [folder], "the missing file alone is downloaded again"
    assert [file.rpartition("/")[2] for file in hub.downloaded()].count("diffusion_pytorch_model.safetensors") == 1


def test_a_model_that_diffusers_downloaded_is_used_from_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("a/model", small_files())
    code = "import huggingface_hub; huggingface_hub.snapshot_download('a/model')"
    hub.python(code, tmp_path)
    num_requests = len(hub.requests)
    plain = hub.resolve(tmp_path, "a/model", HF_HUB_OFFLINE="1")
    halves = hub.resolve(tmp_path, "a/model", flags={"variant": "fp16"}, HF_HUB_OFFLINE="1")
    assert len(hub.requests) == num_requests
    assert "transformer/diffusion_pytorch_model.safetensors" in relative_files(plain[0])
    assert "transformer/diffusion_pytorch_model.fp16.safetensors" in relative_files(halves[0])
    assert len(relative_files(plain[0])) == len(relative_files(halves[0])) == 3, "each variant in a folder of its own"


def test_size_free_disk_and_progress_are_shown_as_plain_lines(hub: FakeHub, tmp_path: Path) -> None:
    """The line before the download, then progress; models that are cached print nothing."""
    hub.add("a/model", small_files())
    words = halation(["generate", "--prompts", tmp_path / "p.txt", "--model_path", "a/model", "--output_dir", "out"])
    (tmp_path / "p.txt").write_text("a car\n")
    run = lambda: subprocess.run(  # noqa: E731
        [str(word) for word in words], env=hub.environment(tmp_path), cwd=tmp_path, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    done = run()
    assert re.search(
        r"^downloading 2 files of a/model, 7\.0 kB \(main, commit [0-9a-f]{12}\); \d.* free in .*hf/hub$",
        done.stderr, re.MULTILINE,
    ), done.stderr  # fmt: skip
    assert re.search(r"^downloading 1/1 MB, .*/s", done.stderr, re.MULTILINE), done.stderr
    assert done.returncode == 2, "its weights are no safetensors file"
    assert "Fetching" not in done.stderr
    assert "downloading" not in run().stderr


def test_a_full_disk_is_named_and_complete_files_are_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("a/model", small_files())
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); answer(['a/model'], {})"
    ((found, _, action),) = json.loads(hub.python(code, tmp_path).splitlines()[-1])
    assert found.startswith("writing a/model to the Hub cache ")
    assert "File too large" in found
    assert "run the same command again: complete files are kept" in action
    assert isinstance(hub.resolve(tmp_path, "a/model")[0], str)


def slow_download(hub: FakeHub, folder: Path) -> list[str]:
    """A command that downloads a model of which one file does not arrive until `hub.release` is set."""
    hub.add("a/model", small_files())
    hub.faults = [Fault("GET /cdn/.*diffusion_pytorch_model.safetensors", hold=True)]
    (folder / "p.txt").write_text("a car\n")
    return halation(["generate", "--prompts", str(folder / "p.txt"), "--model_path", "a/model",
                     "--output_dir", str(folder / "out"), "--progress", "plain"])  # fmt: skip


def test_ctrl_c_ends_a_download_at_once_and_the_next_call_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    words = slow_download(hub, tmp_path)
    log = tmp_path / "log"
    with started(words, log, environment=hub.environment(tmp_path, HF_HUB_OFFLINE="0")) as command:
        until(lambda: any("model.safetensors" in file for file in hub.downloaded()), 60, command)
        until(lambda: list(tmp_path.glob("hf/hub/models--a--model/snapshots/*/transformer/config.json")), 60, command)
        began = time.monotonic()
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(60) == 130
    assert time.monotonic() - began < 30, "the server holds the file for 120 s"
    hub.release.set()
    (folder,) = hub.resolve(tmp_path, "a/model")
    assert (Path(folder) / "transformer/config.json").exists()
    assert [file.rpartition("/")[2] for file in hub.downloaded()].count("config.json") == 1


def test_one_process_downloads_and_the_others_wait_for_it(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("a/model", small_files())
    hub.faults = [Fault("GET /cdn/.*diffusion_pytorch_model.safetensors", hold=True)]
    code = _PRELUDE + "answer(['a/model'], {'progress': 'plain'})"
    environment = hub.environment(tmp_path)
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen([sys.executable, "-c", code], **pipe) for _ in range(3)]
    try:
        until(lambda: sum(line.startswith("GET /api") for line in hub.requests) >= 3, 120)
        hub.release.set()
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], ended
    assert len({out for out, _ in ended}) == 1
    assert sum("downloading 2 files" in err for _, err in ended) == 1
    names = [file.rpartition("/")[2] for file in hub.downloaded()]
    assert names.count("config.json") == 1


def test_partial_files_of_killed_downloads_are_removed_after_a_while(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("a/model", small_files())
    hub.resolve(tmp_path, "a/model")
    blobs = tmp_path / "hf/hub/models--a--model/blobs"
    old, new = blobs / "aa.12345678.incomplete", blobs / "bb.12345678.incomplete"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    hub.resolve(tmp_path, "a/model", flags={"variant": "fp16"})
    assert not old.exists()
    assert new.exists(), "another program may be writing it"


# -- runs


def test_a_run_keeps_its_commit_when_the_branch_moves(hub: FakeHub, tmp_path: Path) -> None:
    """The record of a run has the commit; with it the branch is not asked again, not even for a new revision."""
    repository = hub.add("a/model", small_files())
    first = repository.refs["main"]
    run = tmp_path / "run"
    run.mkdir()
    record = {"job": "train", "fixed": {"hub model": f"a/model@{first}"}, "changes": [], "settings": {}}
    (run / "config.json").write_text(json.dumps(record))
    (before,) = hub.resolve(tmp_path, "a/model")
    second = repository.push(small_files(more__x=b"1"))
    num_requests = len(hub.requests)
    code = f"answer(['a/model'], {{'output_dir': Path({str(run)!r})}})"
    assert json.loads(hub.python(code, tmp_path).splitlines()[-1]) == [before]
    assert len(hub.requests) == num_requests, "what is complete needs no network"
    (after,) = hub.resolve(tmp_path, "a/model")
    assert Path(before).name == first
    assert Path(after).name == second
    # A run of an earlier version: no commit in its record, and all files of the snapshot are its model.
    snapshot = tmp_path / "hf/hub/models--a--model/snapshots" / first
    record = {"job": "train", "fixed": {}, "changes": [], "settings": {"model_path": str(snapshot)}}
    (run / "config.json").write_text(json.dumps(record))
    assert json.loads(hub.python(code, tmp_path).splitlines()[-1]) == [str(snapshot)]


@pytest.mark.slow
def test_generate_runs_from_a_hub_name_and_resumes_offline_on_its_commit(hub: FakeHub, tmp_path: Path) -> None:
    built = tiny_models.built("pixart")
    files = {path.relative_to(built).as_posix(): path.read_bytes() for path in built.rglob("*") if path.is_file()}
    repository = hub.add("own/tiny", files | {"tiny.safetensors": b"twin" * 100_000})
    first = repository.refs["main"]
    (tmp_path / "p.txt").write_text("a red car\na blue car\n")

    def generate(num: int, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
        words = ["generate", "--prompts", "p.txt", "--model_path", "own/tiny", "--num_samples", num, "--nproc", 1]
        words += ["--height", 32, "--width", 32, "--num_inference_steps", 2, "--progress", "plain", *more]
        return subprocess.run(
            halation([*map(str, words), "--output_dir", "out"]),
            env=hub.environment(tmp_path, **environment), cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    done = generate(1)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/config.json").read_text())
    assert record["fixed"]["hub model"] == f"own/tiny@{first}"
    assert record["settings"]["revision"] is None
    assert not any(file.endswith("tiny.safetensors") for file in hub.downloaded())
    repository.push({**files, "vae/config.json": files["vae/config.json"] + b"\n"})
    done = generate(2, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("*.png"))) == 2
    done = generate(2, "--revision", "main")
    assert done.returncode == 2
    assert 'revision: null -> "main"' in done.stderr
    assert "hub model" not in done.stderr or first in done.stderr


@pytest.mark.slow
def test_train_fine_tunes_a_variant_of_the_hub_and_resumes_on_its_commit(hub: FakeHub, tmp_path: Path) -> None:
    built = tiny_models.built("pixart")
    files = {path.relative_to(built).as_posix(): path.read_bytes() for path in built.rglob("*") if path.is_file()}
    halves = {name.replace(".safetensors", ".fp16.safetensors"): data for name, data in files.items()
              if name.endswith(".safetensors")}  # fmt: skip
    repository = hub.add("own/tiny", files | halves)
    first = repository.refs["main"]

    def train(num_steps: int, *more: str) -> subprocess.CompletedProcess[str]:
        words = f"""train --data streets --model_path own/tiny --lora_rank 2 --max_images 4 --batch_size 2
            --image_size 32 --validation_images 0 --no_sample --report_to none --progress none --nproc 1
            --output_dir run --n_steps {num_steps}""".split()
        return subprocess.run(
            halation([*words, *more]), env=hub.environment(tmp_path), cwd=tmp_path, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip

    done = train(1, "--variant", "fp16")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run/config.json").read_text())
    assert record["fixed"]["hub model"] == f"own/tiny@{first}"
    assert record["fixed"]["variant"] == "fp16"
    assert not any(file.endswith("model.safetensors") for file in hub.downloaded()), "only the variant"
    repository.push({**files, **halves, "vae/more.json": b"{}"})
    done = train(2, "--variant", "fp16")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/config.json").read_text())["fixed"]["hub model"] == f"own/tiny@{first}"
    done = train(3)
    assert done.returncode == 2
    assert 'variant: "fp16" -> null' in done.stderr or "is another model than" in done.stderr, done.stderr
