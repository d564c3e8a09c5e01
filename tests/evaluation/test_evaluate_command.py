"""Laws of `halation evaluate`: the same bits on any ranks, resumed or live; provenance."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halation.data.streets import Streets
from halation.errors import HalationError, InputError
from halation.evaluation import command as evaluate
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.model_images import open_model_images
from halation.generation import command as generate
from halation.generation.config import GenerateConfig
from halation.images.png_codec import encode_png
from support import tiny_models
from support.commands import finish, fired, halation, started, until

NUM, SIZE = 44, 32
PROVENANCE = {
    *("metric", "name", "value", "std", "better", "extractor", "weights", "weights_sha256", "resize", "precision"),
    *("num_generated", "num_reference", "generated_hash", "reference_hash", "few", "note", "seconds"),
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of street scenes and the prompts of the first, and tiny real extractors."""
    folder = tmp_path_factory.mktemp("scenes")
    source = Streets(SIZE, SIZE)
    rows = ["image_id,prompt"]
    for name, first in (("generated", 0), ("real", 500)):
        (folder / name).mkdir()
        for number in range(NUM):
            image = source.train(first + number)
            (folder / name / f"{number:03d}.png").write_bytes(encode_png(image.pixels, {}))
            if name == "generated":
                rows.append(f'{number:03d},"{image.caption}"')
    (folder / "prompts.csv").write_text("\n".join(rows) + "\n")
    tiny_models.dinov2_model(folder / "dino")
    tiny_models.clip_model(folder / "clip")
    return folder


@pytest.fixture
def score(scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Evaluate in this process and return the report."""

    def scored(**settings: Any) -> dict[str, Any]:
        output = tmp_path / "report.json"
        output.unlink(missing_ok=True)
        chosen = defaults(scenes) | {"cache_dir": tmp_path / "cache", "output": output, "progress": "none"} | settings
        assert evaluate.run(EvaluateConfig(**chosen)) == 0
        report: dict[str, Any] = json.loads(output.read_text())
        return report

    return scored


def defaults(scenes: Path) -> dict[str, Any]:
    return {
        "generated": str(scenes / "generated"),
        "reference": (str(scenes / "real"),),
        "extractor": str(scenes / "dino"),
        "metrics": ("fd", "kid", "prdc"),
        "allow_few": True,
        "batch_size": 4,
        "nproc": 1,
        "decode_workers": 0,
    }


def command(settings: dict[str, Any]) -> list[str]:
    words = ["evaluate"]
    for name, value in settings.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return halation(words)


def numbers(report: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on who computed it."""
    return {name: {k: v for k, v in found.items() if k != "seconds"} for name, found in report["metrics"].items()}


# -- the same bits


@pytest.mark.slow
@pytest.mark.ranks
def test_three_ranks_with_decoding_processes_give_the_bits_of_one_rank_without(
    scenes: Path, tmp_path: Path, score: Callable[..., dict[str, Any]]
) -> None:
    settings = defaults(scenes) | {"nproc": 3, "decode_workers": 2, "output": tmp_path / "three.json"}
    words = command(settings | {"cache_dir": tmp_path / "other", "progress": "none"})
    assert finish(words, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    report, alone = json.loads((tmp_path / "three.json").read_text()), score()
    assert report["num_ranks"] == 3
    assert numbers(report) == numbers(alone)
    assert report["extremes"] == alone["extremes"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.faults
def test_a_killed_evaluation_resumes_to_the_same_bits(
    scenes: Path, tmp_path: Path, score: Callable[..., dict[str, Any]]
) -> None:
    """A killed evaluation, run again, gives the same bits and computes only what is missing."""
    cache = tmp_path / "other"
    words = command(
        defaults(scenes) | {"nproc": 2, "cache_dir": cache, "output": tmp_path / "two.json", "progress": "none"}
    )
    assert finish(words, tmp_path / "log", "features:3:kill:1") != 0
    assert len(fired(tmp_path / "log")) == 1
    left = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    assert 0 < len(left) < 2 * NUM // 4
    assert finish(words, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert {path: path.stat().st_mtime_ns for path in left} == left
    assert numbers(json.loads((tmp_path / "two.json").read_text())) == numbers(score())


def test_prompts_of_a_live_model_may_be_texts() -> None:
    config = EvaluateConfig(model_path="testcard", prompts=("a red car", "two trees"), height=32, width=32)
    images = open_model_images(config, "cpu")
    assert images.captions == ("a red car", "two trees")
    assert images.facts["settings"]["prompts"] == "--prompts"


def test_a_live_model_gives_the_bits_of_its_images_on_disk(
    tmp_path: Path, scenes: Path, score: Callable[..., dict[str, Any]]
) -> None:
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("prompt,height\n" + "".join(f'"{n}, a prompt",{16 if n % 3 == 1 else ""}\n' for n in range(13)))
    shape = {"height": 24, "width": 32, "num_inference_steps": 2}
    drawn = GenerateConfig(
        prompts_csv=str(prompts),
        model_path="testcard",
        output_dir=tmp_path / "run",
        batch_size=3,
        progress="none",
        **shape,
    )
    assert generate.run(drawn) == 0
    wanted = {"metrics": ("fd", "kid", "clip"), "clip_model": str(scenes / "clip")}
    stored = score(**wanted, generated=str(tmp_path / "run"))
    live = score(**wanted, **shape, generated="", model_path="testcard", prompts=str(prompts), model_batch_size=3)
    assert live["generated"]["kind"] == "model"
    assert stored["generated"]["kind"] == "run"
    for metric in ("fd", "kid", "clip"):
        assert live["metrics"][metric]["value"] == stored["metrics"][metric]["value"]
    assert "--model_path" in live["extremes"]["left_out"]
    first = stored["extremes"]["farthest"][0]
    assert (tmp_path / "run" / first["name"]).is_file()
    assert first["caption"] == f"{first['index']}, a prompt"


def test_nothing_is_computed_twice_and_a_new_metric_computes_only_its_own_features(
    scenes: Path, tmp_path: Path, score: Callable[..., dict[str, Any]]
) -> None:
    first = score()
    there = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")}
    again = score(
        metrics=("fd", "kid", "prdc", "clip"), clip_model=str(scenes / "clip"), prompts=str(scenes / "prompts.csv")
    )
    assert {path: path.stat().st_mtime_ns for path in there} == there
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == len(there) + -(-NUM // 4)
    assert numbers(first)["fd"] == numbers(again)["fd"]


def test_a_image_that_was_replaced_is_seen_although_features_are_kept(
    scenes: Path, tmp_path: Path, score: Callable[..., dict[str, Any]]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(scenes / "generated", folder)
    before = score(generated=str(folder))
    (folder / "007.png").write_bytes(encode_png(np.full((SIZE, SIZE, 3), 200, np.uint8), {}))
    after = score(generated=str(folder))
    assert before["metrics"]["fd"]["generated_hash"] != after["metrics"]["fd"]["generated_hash"]
    assert before["metrics"]["fd"]["value"] != after["metrics"]["fd"]["value"]


# -- statistics


def test_moments_alone_where_images_are_too_many_give_the_same_distance(score: Callable[..., dict[str, Any]]) -> None:
    kept = score(metrics=("fd",))["metrics"]["fd"]["value"]
    streamed = score(metrics=("fd",), keep_features=10)["metrics"]["fd"]["value"]
    assert streamed == pytest.approx(kept, rel=1e-9)
    with pytest.raises(InputError, match="--keep_features"):
        score(keep_features=10)


def test_saved_statistics_stand_for_their_folder_and_two_halves_for_the_whole(
    scenes: Path, tmp_path: Path, score: Callable[..., dict[str, Any]]
) -> None:
    whole = score()
    for name, part in (("all", range(NUM)), ("one", range(20)), ("two", range(20, NUM))):
        (tmp_path / name).mkdir()
        for number in part:
            shutil.copy(scenes / "real" / f"{number:03d}.png", tmp_path / name)
        score(
            generated=str(tmp_path / name), metrics=(), reference=(), save_statistics=tmp_path / f"{name}.safetensors"
        )
    saved = score(reference=(str(tmp_path / "all.safetensors"),))
    for name in ("fd", "kid", "precision", "recall", "density", "coverage"):
        assert saved["metrics"][name]["value"] == whole["metrics"][name]["value"]
    assert saved["metrics"]["fd"]["num_reference"] == NUM
    merged = score(reference=(str(tmp_path / "one.safetensors"), str(tmp_path / "two.safetensors")))
    assert merged["metrics"]["fd"]["value"] == pytest.approx(whole["metrics"]["fd"]["value"], rel=1e-9)
    assert merged["metrics"]["fd"]["num_reference"] == NUM


def test_statistics_of_another_tool_are_read_and_those_of_another_extractor_refused(
    scenes: Path, tmp_path: Path, score: Callable[..., dict[str, Any]]
) -> None:
    from halation.evaluation.saved_statistics import read_statistics

    whole = score(metrics=("fd",))
    score(generated=str(scenes / "real"), metrics=(), reference=(), save_statistics=tmp_path / "ours.safetensors")
    facts = {"num_features": 32, "extractor": "dino"}
    with pytest.raises(InputError, match="created with other settings"):
        read_statistics([tmp_path / "ours.safetensors"], facts)
    other = tiny_models.dinov2_model(tmp_path / "dino", seed=1)
    with pytest.raises(HalationError, match="weights_sha256"):
        score(reference=(str(tmp_path / "ours.safetensors"),), extractor=str(other))

    import safetensors.numpy

    ours = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    covariance = np.cov(ours["features"].astype(np.float64), rowvar=False)
    np.savez(tmp_path / "theirs.npz", mu=ours["features"].mean(0), sigma=covariance)
    foreign = score(metrics=("fd",), reference=(str(tmp_path / "theirs.npz"),))
    assert foreign["metrics"]["fd"]["value"] == pytest.approx(whole["metrics"]["fd"]["value"], rel=1e-5)
    assert foreign["metrics"]["fd"]["num_reference"] is None
    with pytest.raises(HalationError, match="without features"):
        score(metrics=("kid",), reference=(str(tmp_path / "theirs.npz"),))
    np.savez(tmp_path / "pictures.npz", arr_0=np.zeros((2, 8, 8, 3), np.uint8))
    with pytest.raises(HalationError, match="arr_0"):
        score(metrics=("fd",), reference=(str(tmp_path / "pictures.npz"),))
    np.savez(tmp_path / "nan.npz", mu=np.full(32, np.nan), sigma=np.eye(32))
    with pytest.raises(HalationError, match=r"NaN|features"):
        score(metrics=("fd",), reference=(str(tmp_path / "nan.npz"),))


def test_a_damaged_chunk_is_noticed_and_computed_again(tmp_path: Path, score: Callable[..., dict[str, Any]]) -> None:
    before = score()
    chunks = sorted((tmp_path / "cache").rglob("chunk_*.safetensors"))
    for number, chunk in enumerate(chunks[:3]):
        data = bytearray(chunk.read_bytes())
        data[-9 if number else -100] ^= 1
        chunk.write_bytes(bytes(data[: len(data) - 4 * (number == 2)]))
    left = f".chunk_0000001.safetensors.{socket.gethostname()}-4194303-0.tmp"
    (chunks[0].parent / left).write_bytes(b"left by a writer that is gone")
    foreign = chunks[0].parent / ".chunk_0000001.safetensors.another-host-4194303-0.tmp"
    foreign.write_bytes(b"of a writer on another machine, which may be alive")
    assert numbers(score()) == numbers(before)
    assert list((tmp_path / "cache").rglob(".chunk_*")) == [foreign]


def test_how_a_model_wants_its_images_is_part_of_what_features_are_filed_under(
    scenes: Path, tmp_path: Path, score: Callable[..., dict[str, Any]]
) -> None:
    folder = tiny_models.clip_model(tmp_path / "clip")
    wanted = {"extractor": str(folder), "metrics": ("fd",)}
    before = score(**wanted)["metrics"]["fd"]["value"]
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["image_mean"] = [0.1, 0.2, 0.3]
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    after = score(**wanted)["metrics"]["fd"]["value"]
    assert after != before
    assert after == score(**wanted, cache_dir=tmp_path / "fresh")["metrics"]["fd"]["value"]


# -- what comes out


def test_a_image_of_the_reference_is_the_nearest_and_noise_the_farthest(
    scenes: Path, tmp_path: Path, score: Callable[..., dict[str, Any]]
) -> None:
    shutil.copytree(scenes / "generated", tmp_path / "drawn")
    shutil.copy(scenes / "real" / "021.png", tmp_path / "drawn" / "030.png")
    noise = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    (tmp_path / "drawn" / "below").mkdir()
    (tmp_path / "drawn" / "below" / "noise.png").write_bytes(encode_png(noise, {}))
    wanted = {"generated": str(tmp_path / "drawn"), "extractor": "streets"}
    found = score(**wanted)["extremes"]
    assert "euclidean" in found["distance"]
    assert found["extractor"] == "streets"
    assert found["nearest"][0] == {"index": 30, "name": "030.png", "caption": None, "distance": 0.0}
    assert found["farthest"][0]["name"] == "below/noise.png"
    assert [len(found[side]) for side in ("nearest", "farthest")] == [24, 24]
    assert "--keep_features" in score(**wanted, keep_features=10, metrics=("fd",))["extremes"]["left_out"]
    alone = score(extractor="streets", metrics=("agreement",), prompts=str(scenes / "prompts.csv"), num_samples=4)
    assert alone["extremes"] is None


def test_json_is_one_object_on_standard_output_with_every_metric_and_its_provenance(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EvaluateConfig(**defaults(scenes), cache_dir=tmp_path, json=True, progress="none")
    assert evaluate.run(config) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["metrics"]) == {"fd", "kid", "precision", "recall", "density", "coverage"}
    for found in report["metrics"].values():
        assert found.keys() >= PROVENANCE
        assert np.isfinite(found["value"])
        assert found["few"] is True
        assert len(found["weights_sha256"]) == len(found["reference_hash"]) == 64
    assert {"torch", "halation", "transformers", "numpy", "pillow"} <= report["versions"].keys()


def test_the_table_marks_numbers_of_few_images(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EvaluateConfig(**defaults(scenes), cache_dir=tmp_path, progress="none")
    assert evaluate.run(config) == 0
    said = capsys.readouterr().out
    assert "FD-dino *" in said
    assert f"{NUM} generated pictures" in " ".join(said.split())


def test_captions_raise_the_agreement_of_their_own_images(
    scenes: Path, score: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    wanted = {
        "extractor": "streets",
        "metrics": ("fd", "kid", "agreement"),
        "reference": ("streets",),
        "num_reference": 60,
    }
    right = score(**wanted, prompts=str(scenes / "prompts.csv"))
    assert right["metrics"]["fd"]["name"] == "FD-streets"
    assert right["metrics"]["kid"]["name"] == "KID-streets"
    lines = (scenes / "prompts.csv").read_text().splitlines()
    prompts = [line.partition(",")[2] for line in lines[1:]]
    moved = [f"{number:03d},{prompt}" for number, prompt in enumerate(prompts[11:] + prompts[:11])]
    (tmp_path / "moved.csv").write_text("\n".join([lines[0], *moved]) + "\n")
    wrong = score(**wanted, prompts=str(tmp_path / "moved.csv"))
    assert right["metrics"]["agreement"]["value"] > wrong["metrics"]["agreement"]["value"] + 0.2


# -- honest or not at all


def refusals() -> list[Any]:
    def named(name: str, pattern: str, settings: Callable[[Path, Path], dict[str, Any]]) -> Any:
        return pytest.param(settings, pattern, id=name)

    return [
        named("neither", "neither --generated", lambda _s, _t: {"generated": ""}),
        named("both", "with --model_path testcard", lambda _s, _t: {"model_path": "testcard"}),
        named("no such folder", "no folder", lambda _s, tmp: {"generated": str(tmp / "nothing")}),
        named("no reference", "no --reference", lambda _s, _t: {"reference": ()}),
        named("missing reference", "--reference", lambda _s, tmp: {"reference": (str(tmp / "nothing"),)}),
        named("empty reference", "no images", lambda _s, tmp: {"reference": (str(made(tmp / "empty")),)}),
        named("two references", "one folder", lambda s, _t: {"reference": (str(s / "real"), str(s / "real"))}),
        named("unset reference", "unset", lambda _s, _t: {"reference": ("",)}),
        named("more than there are", "--num_samples", lambda _s, _t: {"num_samples": NUM + 1}),
        named("statistics without their ending", "safetensors", lambda _s, t: {"save_statistics": t / "s.npz"}),
        named("output that is a folder", "is a folder", lambda _s, t: {"output": made(t / "folder")}),
        named("statistics twice", "same statistics twice", lambda s, t: {"reference": (saved(s, t), saved(s, t))}),
        named(
            "a lopsided covariance", "not symmetric", lambda _s, t: {"metrics": ("fd",), "reference": (lopsided(t),)}
        ),
        named("no image high", "--height 0", lambda _s, _t: {"generated": "", "model_path": "testcard", "height": 0}),
        named(
            "a list that counts otherwise",
            "cannot be matched",
            lambda s, t: {"metrics": ("clip",), "prompts": uncounted(t)},
        ),
        named("one image", "at least 2", lambda _s, _t: {"num_samples": 1}),
        named("a link to nothing", "is a broken link", lambda _s, t: {"generated": str(dangling(t))}),
        named("few", "at least 1000", lambda _s, _t: {"allow_few": False}),
        named(
            "fid of few",
            "at least 2048",
            lambda s, t: {"allow_few": False, "metrics": ("fid",), "inception_weights": inception(t)},
        ),
        named("fid of streets", "FD-streets", lambda _s, _t: {"metrics": ("fid",), "extractor": "streets"}),
        named("no prompts", "no prompts for clip", lambda _s, _t: {"metrics": ("clip",)}),
        named("other prompts", "cannot be matched", lambda s, t: {"metrics": ("clip",), "prompts": other_prompts(t)}),
        named("unknown extractor", "neither a known name", lambda _s, _t: {"extractor": "vgg"}),
        named(
            "missing weights",
            "not a file",
            lambda _s, t: {"extractor": "inception", "weights": str(t / "none.pth")},
        ),
        named("prompts of others", "none of", lambda s, t: {"metrics": ("agreement",), "prompts": plain_prompts(t)}),
        named("too many neighbours", "--nearest_k", lambda _s, _t: {"nearest_k": 100}),
        named("odd batch", "--batch_size 0", lambda _s, _t: {"batch_size": 0}),
        named(
            "streets at another shape", "square", lambda _s, t: {"reference": ("streets",), "generated": str(wide(t))}
        ),
    ]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def inception(folder: Path) -> str:
    return str(tiny_models.inception_pth(folder / "inception.pth"))


def saved(scenes: Path, folder: Path) -> str:
    settings = defaults(scenes) | {"metrics": (), "reference": (), "save_statistics": folder / "s.safetensors"}
    evaluate.run(EvaluateConfig(**settings, cache_dir=folder / "cache", progress="none"))
    return str(folder / "s.safetensors")


def lopsided(folder: Path) -> str:
    np.savez(folder / "lopsided.npz", mu=np.zeros(32), sigma=np.triu(np.ones((32, 32))))
    return str(folder / "lopsided.npz")


def other_prompts(folder: Path) -> str:
    (folder / "other.txt").write_text("one\ntwo\n")
    return str(folder / "other.txt")


def uncounted(folder: Path) -> str:
    """No ids: the first one is 000001, and the images begin with 000."""
    (folder / "uncounted.txt").write_text("a cat\n" * (NUM + 1))
    return str(folder / "uncounted.txt")


def dangling(folder: Path) -> Path:
    made(folder / "dangling")
    Image.new("RGB", (32, 32)).save(folder / "dangling" / "0.png")
    (folder / "dangling" / "1.png").symlink_to(folder / "nothing.png")
    return folder / "dangling"


def plain_prompts(folder: Path) -> str:
    (folder / "plain.csv").write_text("image_id,prompt\n" + "".join(f"{n:03d},a cat\n" for n in range(NUM)))
    return str(folder / "plain.csv")


def wide(folder: Path) -> Path:
    made(folder / "wide")
    for number in range(3):
        Image.new("RGB", (40, 32), (number, 0, 0)).save(folder / "wide" / f"{number}.png")
    return folder / "wide"


@pytest.mark.parametrize(("settings", "pattern"), refusals())
def test_what_cannot_be_scored_is_an_error_that_says_what_to_do(
    settings: Callable[[Path, Path], dict[str, Any]],
    pattern: str,
    scenes: Path,
    tmp_path: Path,
    score: Callable[..., Any],
) -> None:
    with pytest.raises(HalationError, match=pattern) as error:
        score(**settings(scenes, tmp_path))
    assert error.value.exit_code == 2
    assert not (tmp_path / "report.json").exists()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "empty": lambda path: path.write_bytes(b""),
    "a text": lambda path: path.write_bytes(b"no image at all"),
    "of another format": lambda path: Image.new("RGB", (8, 8)).save(path, "GIF"),
    "of another size": lambda path: Image.new("RGB", (16, 16)).save(path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_broken_image_is_named_and_nothing_is_scored(
    damage: str, scenes: Path, tmp_path: Path, score: Callable[..., Any]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(scenes / "generated", folder)
    DAMAGES[damage](folder / "017.png")
    for workers in (0, 1):
        with pytest.raises(InputError, match=r"017\.png"):
            score(generated=str(folder), decode_workers=workers)
    if damage == "of another size":
        assert score(generated=str(folder), allow_sizes=True)["metrics"]["fd"]["num_generated"] == NUM
        with pytest.raises(HalationError, match=r"017\.png"):  # although its features are there now
            score(generated=str(folder))


def test_images_in_linked_folders_count_if_asked_for_and_other_formats_are_named(
    scenes: Path,
    tmp_path: Path,
    score: Callable[..., dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = made(tmp_path / "linked")
    shutil.copy(scenes / "generated" / "000.png", folder)
    (folder / "more").symlink_to(scenes / "generated")
    (folder / "again").symlink_to(folder)
    Image.new("RGB", (SIZE, SIZE)).save(folder / "old.bmp")
    with pytest.raises(InputError, match="more is a link that leads out of"):
        score(generated=str(folder), metrics=("fd",))
    monkeypatch.setenv("HALATION_FOLLOW_LINKS", "1")
    report = score(generated=str(folder), metrics=("fd",))
    assert report["generated"] == {"kind": "folder", "path": str(folder), "num": NUM + 1, "num_left_out": 1}
    assert "old.bmp" in caplog.text


def test_an_id_with_several_prompts_is_matched_by_its_seeds_or_not_at_all(
    scenes: Path, tmp_path: Path, score: Callable[..., dict[str, Any]]
) -> None:
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("image_id,prompt\n7,a red car\n7,two dogs\n8,a cat\n")
    folder = made(tmp_path / "drawn")
    for name, source in (("7_seed43", "001"), ("7_seed44", "002"), ("8_seed45", "003")):
        shutil.copy(scenes / "generated" / f"{source}.png", folder / f"{name}.png")
    wanted = {
        "generated": str(folder),
        "metrics": ("clip",),
        "clip_model": str(scenes / "clip"),
        "prompts": str(prompts),
    }
    with pytest.raises(InputError, match="--seed_start"):
        score(**wanted)
    right = score(**wanted, seed_start=43)["metrics"]["clip"]["value"]
    (tmp_path / "other.csv").write_text("image_id,prompt\n7_seed43,a red car\n7_seed44,two dogs\n8_seed45,a cat\n")
    assert right == score(**wanted | {"prompts": str(tmp_path / "other.csv")})["metrics"]["clip"]["value"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.faults
def test_one_rank_that_is_told_to_stop_stops_all_and_the_same_command_goes_on(scenes: Path, tmp_path: Path) -> None:
    settings = {"nproc": 2, "cache_dir": tmp_path / "cache", "output": tmp_path / "two.json", "progress": "none"}
    words = command(defaults(scenes) | settings)
    with started(words, tmp_path / "log", "features:1+:sleep=0.3") as running:
        until(lambda: list((tmp_path / "cache").rglob("chunk_*")), command=running)
        os.kill(running.rank_pids()[1], signal.SIGTERM)
        assert running.process.wait(30) == 143, running.said()
    assert "run the same command to resume" in (tmp_path / "log").read_text()
    assert finish(words, tmp_path / "log") == 0, (tmp_path / "log").read_text()


def test_a_run_is_scored_only_where_its_folder_is_what_its_ledger_says(
    tmp_path: Path, scenes: Path, score: Callable[..., dict[str, Any]]
) -> None:
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {n}\n" for n in range(6)))
    settings = {"prompts_csv": str(tmp_path / "prompts.txt"), "model_path": "testcard", "height": 16, "width": 16}
    run = tmp_path / "run"
    assert generate.run(GenerateConfig(**settings, output_dir=run, progress="none")) == 0
    wanted = {"generated": str(run), "metrics": ("fd",)}
    assert score(**wanted)["generated"] == {"kind": "run", "path": str(run), "num": 6}
    image = run / "000003_seed44.png"
    whole = image.read_bytes()
    image.unlink()
    with pytest.raises(InputError, match="in its ledger and not in the folder"):
        score(**wanted)
    image.write_bytes(encode_png(np.zeros((16, 16, 3), np.uint8), {}))
    with pytest.raises(InputError, match="its SHA-256 differs from the ledger"):
        score(**wanted, cache_dir=tmp_path / "fresh")
    image.write_bytes(whole)
    shutil.copy(image, run / "extra.png")
    with pytest.raises(InputError, match="not in its ledger"):
        score(**wanted)
    (run / "extra.png").unlink()
    assert score(**wanted)["metrics"]["fd"]["num_generated"] == 6
    other = tmp_path / "wrong.txt"
    other.write_text("".join(f"another {n}\n" for n in range(6)))
    with pytest.raises(InputError, match="was generated for"):
        score(**wanted, prompts=str(other))


def test_a_run_that_is_not_complete_is_refused(tmp_path: Path, score: Callable[..., Any]) -> None:
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {n}\n" for n in range(6)))
    words = ["generate", "--prompts", str(tmp_path / "prompts.txt"), "--model_path", "testcard", "--height", "16"]
    words += ["--width", "16", "--output_dir", str(tmp_path / "run"), "--progress", "none"]
    assert finish(halation(words), tmp_path / "log", "paint.000002:1+:raise") == 1
    with pytest.raises(InputError, match=r"1 of 6 images of that run is missing \(1 failed\)") as refusal:
        score(generated=str(tmp_path / "run"))
    assert "--allow_missing" in refusal.value.action


@pytest.mark.parametrize("cluster", ["local", "files"])
def test_the_images_of_a_run_with_failures_are_scored_if_allowed(
    tmp_path: Path, scenes: Path, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report and each score name what is missing, and the exit code is 1."""
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {n}\n" for n in range(6)))
    run = tmp_path / "run"
    words = ["generate", "--prompts", str(tmp_path / "prompts.txt"), "--model_path", "testcard", "--height", "16"]
    words += ["--width", "16", "--output_dir", str(run), "--progress", "none", "--cluster", cluster]
    assert finish(halation(words), tmp_path / "log", "paint.000002:1+:raise") == 1
    allowed = defaults(scenes) | {"generated": str(run), "metrics": ("fd", "kid"), "progress": "none"}
    config = EvaluateConfig(**allowed, allow_missing=True, cache_dir=tmp_path / "cache", output=tmp_path / "out.json")
    assert evaluate.run(config) == 1
    said = " ".join(capsys.readouterr().out.split())
    name = "000002_seed43.png" if cluster == "local" else "row 2"
    assert f"5 images of {run} 1 missing: {name}" in said
    assert "FD-dino * †" in said
    assert "† without 1 missing image; do not compare with a complete run" in said
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["generated"] == {"kind": "run", "path": str(run), "num": 5, "num_missing": 1, "missing": [name]}
    assert {metric["num_missing"] for metric in report["metrics"].values()} == {1}
    assert {metric["num_generated"] for metric in report["metrics"].values()} == {5}
    (run / "000004_seed45.png").unlink()
    report = evaluate.evaluate(config)
    assert report["generated"]["missing"] == [name, "000004_seed45.png"]
    assert finish(halation(words), tmp_path / "again") == 0, (tmp_path / "again").read_text()
    assert evaluate.run(config) == 0, "of a complete run nothing is missing"
    assert "missing" not in json.loads((tmp_path / "out.json").read_text())["generated"]


def test_a_run_without_any_image_is_not_scored_even_if_allowed(tmp_path: Path, scenes: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a prompt\n")
    words = ["generate", "--prompts", str(tmp_path / "prompts.txt"), "--model_path", "testcard", "--height", "16"]
    words += ["--width", "16", "--output_dir", str(tmp_path / "run"), "--progress", "none"]
    assert finish(halation(words), tmp_path / "log", "paint.000001:1+:raise") == 1
    config = EvaluateConfig(**defaults(scenes) | {"generated": str(tmp_path / "run")}, allow_missing=True)
    with pytest.raises(InputError, match=r"1 of 1 image of that run is missing") as refusal:
        evaluate.run(config)
    assert refusal.value.expected == "a run with at least one image"
    assert "--allow_missing" not in refusal.value.action


def test_a_model_has_no_missing_images_to_allow() -> None:
    with pytest.raises(InputError, match="--allow_missing"):
        evaluate.run(EvaluateConfig(model_path="testcard", prompts="p.txt", allow_missing=True))


def test_a_check_opens_what_an_evaluation_needs_and_scores_nothing(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = defaults(scenes) | {
        "metrics": ("fd", "clip"),
        "clip_model": str(scenes / "clip"),
        "generated": str(tmp_path / "later"),
    }
    assert evaluate.run(EvaluateConfig(**wanted, check=True, cache_dir=tmp_path / "cache")) == 0
    assert "clip" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()
    with pytest.raises(InputError, match="at least 1000"):
        evaluate.run(EvaluateConfig(**wanted | {"allow_few": False}, check=True))
    shutil.copytree(scenes / "clip", tmp_path / "mute")
    for path in (tmp_path / "mute").glob("*token*"):
        path.unlink()
    with pytest.raises(InputError, match="mute"):
        evaluate.run(EvaluateConfig(**wanted | {"clip_model": str(tmp_path / "mute")}, check=True))


@pytest.mark.slow
def test_every_metric_bears_a_handful_of_images_where_few_are_allowed(
    scenes: Path, tmp_path: Path, score: Callable[..., dict[str, Any]]
) -> None:
    weights = inception(tmp_path)
    report = score(metrics=("fid", "is", "fd", "kid", "prdc"), inception_weights=weights, num_samples=4)
    assert set(report["metrics"]) == {"fid", "is", "fd", "kid", "precision", "recall", "density", "coverage"}
    assert report["metrics"]["fid"]["name"] == "FD-inception"
    assert all(found["few"] for found in report["metrics"].values())


def test_help_needs_no_torch() -> None:
    import subprocess

    code = "import sys; from halation.cli import main; code = main(['evaluate', '--help']);"
    code += " assert 'torch' not in sys.modules; sys.exit(code)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "--resize" in found.stdout
