"""FID's Inception: the features of torch-fidelity, pytorch-fid and clean-fid from the same weights, and weights that are safe to open."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import pickle
import threading
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from halation.errors import InputError
from halation.evaluation.extractors import open_extractor
from halation.evaluation.extractors import weights as extractor_weights
from halation.evaluation.extractors.extractor import Extractor, full_precision
from halation.evaluation.extractors.inception import InceptionV3, build_inception, find_weight_mismatch
from halation.evaluation.extractors.weights import (
    FID_NAME,
    FID_SHA256,
    fetch_fid_weights,
    fetch_file,
    read_state_dict,
)
from halation.input_files import file_sha256
from halation.runs.run_folder import cache_folder
from support import oracles, tiny_extractors


def images(num: int = 2) -> list[npt.NDArray[np.uint8]]:
    """Smooth images of one shape with some noise: features of pure noise hardly differ."""
    generator = np.random.default_rng(3)
    rows, columns = np.mgrid[0:90, 0:120][..., None] / 120
    waves = [np.sin(generator.uniform(0, 20, 3) * rows + generator.uniform(0, 20, 3) * columns) for _ in range(num)]
    noisy = [120 + 90 * wave + generator.normal(0, 12, (90, 120, 3)) for wave in waves]
    return [image.clip(0, 255).astype(np.uint8) for image in noisy]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_extractors.inception_pth(tmp_path_factory.mktemp("inception") / "random.pth")


@pytest.fixture(scope="module")
def extractors(weights: Path) -> Any:
    return functools.cache(lambda rule: open_extractor("inception", device="cpu", resize=rule, weights=str(weights)))


def batch(extractor: Extractor, chosen: list[npt.NDArray[np.uint8]]) -> Tensor:
    return torch.from_numpy(np.stack([extractor.transform(image) for image in chosen]))


def stacked(chosen: list[npt.NDArray[np.uint8]]) -> Tensor:
    return torch.from_numpy(np.stack(chosen)).permute(0, 3, 1, 2).contiguous()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


# Equal to the reference implementations


def fidelity_network(weights: Path) -> Any:
    module = oracles.torch_fidelity("feature_extractor_inceptionv3")
    return module.FeatureExtractorInceptionV3(
        "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(weights)
    )


def test_rule_tf_gives_the_features_and_logits_of_torch_fidelity(weights: Path, extractors: Any) -> None:
    found = extractors("tf")(batch(extractors("tf"), images()))
    with torch.inference_mode():
        features, logits = fidelity_network(weights)(stacked(images()))
    assert features.std(0).mean() > 0.05 * features.mean()
    assert relative(found["features"], features) < 1e-5
    assert relative(found["logits"], logits) < 1e-5


def test_rule_torch_gives_the_features_of_pytorch_fid(weights: Path, extractors: Any, monkeypatch: Any) -> None:
    module = oracles.pytorch_fid("inception")
    monkeypatch.setattr(module, "load_state_dict_from_url", lambda url, progress: torch.load(weights))
    with torch.inference_mode():
        expected = module.InceptionV3().eval()(stacked(images()).float() / 255)[0][:, :, 0, 0]
    found = extractors("torch")(batch(extractors("torch"), images()))["features"]
    assert relative(found, expected) < 1e-5


def test_rule_clean_gives_the_features_of_clean_fid(weights: Path, extractors: Any) -> None:
    """clean-fid reads its network from a TorchScript file and gives it what its own resizer made: so does this, with random weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resize = oracles.clean_fid("resize").build_resizer("clean")
        prepared = torch.from_numpy(np.stack([resize(image).transpose(2, 0, 1) for image in images()]))
    layers = nn.Sequential(*[part for name, part in fidelity_network(weights).named_children() if name != "fc"])
    wrapper = oracles.clean_fid("inception_torchscript").InceptionV3W
    network = wrapper.__new__(wrapper)
    nn.Module.__init__(network)
    network.layers, network.resize_inside = layers, False
    with torch.inference_mode():
        expected = network(prepared)
    assert relative(extractors("clean")(batch(extractors("clean"), images()))["features"], expected) < 1e-5


def test_each_rule_scales_its_input_as_its_reference_does(extractors: Any) -> None:
    """The two ways differ by up to 1/128, which the features show."""
    same = batch(extractors("tf"), images(1))
    one, other = extractors("tf")(same)["features"], extractors("torch")(same)["features"]
    assert relative(one, other) > 1e-4
    assert extractors("tf").facts["normalisation"] == "(x-128)/128"
    assert extractors("torch").facts["normalisation"] == "2*(x/255)-1"


# The network by itself


def test_folding_the_normalisation_changes_features_by_less_than_1e_5() -> None:
    tensors = tiny_extractors.inception_tensors(1)
    with torch.device("meta"):
        plain = InceptionV3().eval()
    plain.load_state_dict(tensors, assign=True)
    x = torch.rand(2, 3, 299, 299, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.inference_mode():
        expected, found = plain(x), build_inception(tensors)(x)
    assert relative(found[0], expected[0]) < 1e-5
    assert relative(found[1], expected[1]) < 1e-5


@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_features_do_not_depend_on_neighbours_or_place(weights: Path, dtype: str) -> None:
    extractor = open_extractor("inception", device="cpu", dtype=dtype, weights=str(weights))
    inputs = batch(extractor, images(3))
    whole = extractor(inputs)
    turned = extractor(inputs.flip(0))
    alone = extractor(torch.cat([inputs[1:2], torch.zeros_like(inputs[1:])]))
    for name in ("features", "logits"):
        assert whole[name].dtype == torch.float32
        assert torch.equal(turned[name].flip(0), whole[name])
        assert torch.equal(alone[name][0], whole[name][1])


def test_half_precision_is_recorded_and_close(weights: Path, extractors: Any) -> None:
    extractor = open_extractor("inception", device="cpu", dtype="bf16", weights=str(weights))
    inputs = batch(extractor, images(2))
    exact, rough = extractors("clean")(inputs)["features"], extractor(inputs)["features"]
    assert extractor.facts["dtype"] == "bf16"
    assert 1e-5 < float((rough - exact).norm() / exact.norm()) < 0.02


def test_full_precision_holds_inside_and_leaves_no_trace() -> None:
    cudnn: Any = torch.backends.cudnn

    def settings() -> list[Any]:
        precisions = [switch.fp32_precision for switch in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)]
        return [*precisions, cudnn.benchmark, cudnn.deterministic]

    original = settings()
    try:
        torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision = "tf32", "tf32"
        cudnn.benchmark = True
        before = settings()
        with full_precision():
            assert settings() == ["ieee", "ieee", "ieee", False, True]
        assert settings() == before
        with pytest.raises(KeyError), full_precision():
            raise KeyError
        assert settings() == before
    finally:
        torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision = original[0], original[1]
        cudnn.benchmark = original[3]


# Weight files


def test_all_kinds_of_files_give_the_same_features(tmp_path: Path, weights: Path, extractors: Any) -> None:
    """Files from before torch 1.6, as the released one, are no zip archives."""
    inputs = batch(extractors("clean"), images(1))
    expected = extractors("clean")(inputs)["features"]
    old = tiny_extractors.inception_pth(tmp_path / "old.pth", zipped=False)
    safe = tiny_extractors.inception_safetensors(tmp_path / "safe.safetensors")
    for file in (old, safe):
        extractor = open_extractor("inception", device="cpu", weights=str(file))
        assert torch.equal(extractor(inputs)["features"], expected)
        assert extractor.facts["weights_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_counters_of_the_normalisation_may_be_missing() -> None:
    tensors = {name: value for name, value in tiny_extractors.inception_tensors().items() if "num_batches" not in name}
    assert find_weight_mismatch(tensors) == ""
    assert build_inception(tensors).fc.weight.equal(tensors["fc.weight"])


def test_other_weights_are_never_called_fid(extractors: Any) -> None:
    assert (extractors("clean").fd_title, extractors("clean").kid_title) == ("FD-inception", "KID-inception")
    assert extractors("clean").facts["pinned"] is False


def test_the_pinned_weights_are_called_fid(weights: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("halation.evaluation.extractors.inception.FID_SHA256", file_sha256(weights))
    extractor = open_extractor("inception", device="cpu", weights=str(weights))
    assert (extractor.fd_title, extractor.kid_title) == ("FID", "KID")


def test_a_file_of_another_network_is_refused(tmp_path: Path) -> None:
    tensors = tiny_extractors.inception_tensors()
    tensors["fc.weight"] = torch.zeros(1000, 2048)
    torch.save(tensors, tmp_path / "other.pth")
    with pytest.raises(
        InputError, match=r"does not hold FID's Inception: 1 tensors differ, first fc.weight: \(1000, 2048\)"
    ):
        open_extractor("inception", device="cpu", weights=str(tmp_path / "other.pth"))


class Command:
    """What a hostile pickle does."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_never_run(tmp_path: Path, zipped: bool) -> None:
    file, ran = tmp_path / "hostile.pth", tmp_path / "ran"
    torch.save({"fc.weight": Command(ran)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match="holds more than tensors"):
        read_state_dict(file)
    assert not ran.exists()


def test_damaged_and_foreign_files_are_refused(tmp_path: Path, weights: Path) -> None:
    cut = tmp_path / "cut.pth"
    cut.write_bytes(weights.read_bytes()[:5000])
    safe = tmp_path / "cut.safetensors"
    safe.write_bytes(b"\x10" + bytes(40))
    plain = tmp_path / "plain.pkl"
    plain.write_bytes(pickle.dumps([1, 2], protocol=2))
    empty = tmp_path / "empty.pth"
    empty.touch()
    listed = tmp_path / "list.pth"
    torch.save([torch.zeros(1)], listed)
    for file in (cut, safe, plain, empty, listed):
        with pytest.raises(InputError, match=file.name):
            read_state_dict(file)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.pth is not a file"):
        open_extractor("inception", device="cpu", weights=str(tmp_path / "nowhere.pth"))


# Download


class Server(http.server.ThreadingHTTPServer):
    """Answers /whole with the content, /cut with half of what it promises, and everything else with 404."""

    content = bytes(range(256)) * 9000
    num_asked = 0


class Answers(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.num_asked += 1
        if self.path not in ("/whole", "/cut"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(Server.content)))
        self.end_headers()
        self.wfile.write(Server.content[: len(Server.content) // (2 if self.path == "/cut" else 1)])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Answers) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")


SHA256 = hashlib.sha256(Server.content).hexdigest()


def address(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.server_port}/{path}"


@pytest.mark.usefixtures("online")
def test_a_download_happens_once_and_is_checked(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "cache" / "weights.pth"
    for _ in range(2):
        assert fetch_file(address(server, "whole"), file, SHA256).read_bytes() == Server.content
    assert server.num_asked == 1


@pytest.mark.usefixtures("online")
def test_ranks_that_start_together_download_once(server: Server, tmp_path: Path) -> None:
    arguments = (address(server, "whole"), tmp_path / "weights.pth", SHA256)
    threads = [threading.Thread(target=fetch_file, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.num_asked == 1
    assert (tmp_path / "weights.pth").read_bytes() == Server.content


@pytest.mark.usefixtures("online")
def test_what_a_killed_download_left_is_swept(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".weights.pth.host-1-0.tmp").write_bytes(b"half")
    fetch_file(address(server, "whole"), tmp_path / "weights.pth", SHA256)
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("path", "sha256", "message"),
    [
        ("whole", "0" * 64, "returned 2304000 bytes with the SHA-256"),
        ("cut", SHA256, "the connection ended after 1152000 of 2304000 bytes"),
        ("absent", SHA256, "cannot be downloaded: 404 Not Found"),
    ],
)
def test_a_bad_download_leaves_nothing_and_says_what_to_do(
    server: Server, tmp_path: Path, path: str, sha256: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        fetch_file(address(server, path), tmp_path / "weights.pth", sha256)
    assert sha256 in caught.value.expected
    assert f"copy it to {tmp_path / 'weights.pth'}" in caught.value.action
    assert "--weights FILE" in caught.value.action
    assert [file.name for file in tmp_path.iterdir() if not file.name.endswith(".lock")] == []


@pytest.mark.usefixtures("online")
def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    with Server(("127.0.0.1", 0), Answers) as closed:
        url = address(closed, "whole")
    with pytest.raises(InputError, match=r"cannot be downloaded: .*refused"):
        fetch_file(url, tmp_path / "weights.pth", SHA256)


@pytest.mark.usefixtures("online")
def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot create the cache folder") as caught:
        fetch_file("http://127.0.0.1:9/", tmp_path / "file" / "weights.pth", SHA256)
    assert "HALATION_CACHE" in caught.value.action


def test_a_changed_file_in_the_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(b"something else")
    with pytest.raises(InputError, match="has the SHA-256") as caught:
        fetch_file("http://127.0.0.1:9/", tmp_path / "weights.pth", SHA256)
    assert "remove it" in caught.value.action


def test_offline_without_weights_says_where_they_come_from_and_where_they_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALATION_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set") as caught:
        open_extractor("inception", device="cpu")
    assert extractor_weights.FID_URL in caught.value.expected
    assert FID_SHA256 in caught.value.expected
    assert str(tmp_path / FID_NAME) in caught.value.action


def test_the_cache_is_in_the_home_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HALATION_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "halation"
    monkeypatch.setenv("HALATION_CACHE", str(tmp_path))
    (tmp_path / FID_NAME).write_bytes(b"not it")
    with pytest.raises(InputError, match=FID_NAME):
        fetch_fid_weights()


def packed_pth(file: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3")
        archive.writestr("archive/byteorder", "little")
    return file


BUFFER = b"\x80\x02cbuiltins\nbytearray\nJ\x00\x5e\xd0\x7a\x85R."
"""A bytearray of 2 GB, in twenty-five bytes."""


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_asks_for_a_buffer_of_gigabytes_is_refused(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "w.pth"
    if zipped:
        packed_pth(file, BUFFER)
    else:
        torch.save({"w": torch.zeros(1)}, file, _use_new_zipfile_serialization=False)
        heads = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
        file.write_bytes(b"".join(heads) + BUFFER + pickle.dumps([], 2))
    with pytest.raises(InputError, match="bytearray"):
        read_state_dict(file)


def test_a_pickle_behind_which_much_else_lies_is_scanned_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"\x80\x02" + b"N0" * (9 << 20) + BUFFER[2:])
    with pytest.raises(InputError, match="cannot be read"):
        read_state_dict(tmp_path / "w.pth")


def test_packed_and_large_pickles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="compressed members"):
        read_state_dict(packed_pth(tmp_path / "w.pth", bytes(1 << 20), zipfile.ZIP_DEFLATED))
    with pytest.raises(InputError, match=r"data\.pkl is too large \(17 MiB\)"):
        read_state_dict(packed_pth(tmp_path / "w.pth", bytes(17 << 20)))
