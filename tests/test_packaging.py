"""`pip install .` installs the whole package with weights, cards, page and types."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml

import halation
from halation.errors import read_extras
from halation.models.model_folder import FOLDER, bundled_names

ROOT = Path(__file__).parents[1]
PACKAGE = Path(halation.__file__).parent
HALATION = Path(sys.executable).with_name("halation")
OFFLINE = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_CONFIG_FILE": os.devnull}
no_setuptools = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="setuptools, which builds the package, is not installed here"
)


def wanted() -> set[str]:
    """Every file of the package that is not made by running it."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"halation/{path.relative_to(PACKAGE).as_posix()}" for path in files}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in, because a build leaves folders behind: of the files that the Dockerfile copies."""
    folder = tmp_path_factory.mktemp("source")
    (names,) = re.findall(r"^COPY (.*) \./$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for name in names.split():
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    words = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "built", "."]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=source, env=OFFLINE, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (source / "built").glob("*.whl")
    return found


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_version_is_told_at_once_and_is_the_package_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == halation.__version__
    for word in ("--version", "-V"):
        done = subprocess.run([HALATION, word], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"halation {halation.__version__}\n")
    words = "import sys; from halation.cli import main; main(['--version']);"
    words += " sys.exit('numpy' in sys.modules or 'tyro' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, timeout=60).returncode == 0


def test_the_extras_of_the_container_image_exist() -> None:
    (extras,) = re.findall(r"'\.\[(.*)\]'", (ROOT / "Dockerfile").read_text())
    assert set(extras.split(",")) <= read_extras().keys()


BARE = r"""
import importlib, json, pkgutil, re, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def needed(name, found):
    if name not in found:
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            return found
        for line in lines:
            if "extra ==" not in line:
                needed(plain(line), found)
    return found

def plain(line):
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", line)[0]).lower()

core = needed("halation", set())
hidden = {module for module, homes in packages_distributions().items() if not core & set(map(plain, homes))}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
import halation, halation.errors
missing = {}
for module in pkgutil.walk_packages(halation.__path__, "halation."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
    except halation.errors.InputError as error:
        assert "pip install" in error.action, module.name
print(json.dumps(missing))
"""


@pytest.mark.slow
def test_with_declared_dependencies_every_module_imports_or_needs_an_extra(tmp_path: Path) -> None:
    """With nothing but the declared dependencies every module imports or names an extra."""
    done = subprocess.run([sys.executable, "-c", BARE], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    missing = json.loads(done.stdout.splitlines()[-1])
    assert missing["halation.gallery.server"] in ("starlette", "uvicorn"), "what is not a dependency is really hidden"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {re.split(r"[^\w-]", entry)[0] for entries in extras.values() for entry in entries}
    assert set(missing.values()) <= packages, missing


@pytest.mark.slow
@no_setuptools
def test_a_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
        for name in bundled_names():
            stored = archive.read(f"halation/models/bundled/{name}/model.safetensors")
            assert stored == (FOLDER / name / "model.safetensors").read_bytes()
    assert held == wanted()
    assert {
        "halation/py.typed",
        "halation/gallery/page/index.html",
        "halation/evaluation/extractors/streets_net.safetensors",
    } <= held
    assert len(licences) == 1


@pytest.mark.slow
@no_setuptools
def test_the_wheel_says_what_it_is_and_what_it_needs(wheel: Path) -> None:
    told = metadata(wheel)
    assert told["Version"] == halation.__version__
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == ">=3.11"
    assert told["Description-Content-Type"] == "text/markdown"
    classifiers = told.get_all("Classifier") or []
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert {"train", "wandb", "trackio", "video", "ray", "deepspeed", "web", "fast"} <= set(
        told.get_all("Provides-Extra") or []
    )


@pytest.mark.slow
@no_setuptools
def test_from_the_wheel_alone_the_command_answers_and_finds_its_model(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "installed"
    words = ["pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(place), str(wheel)]
    done = subprocess.run([sys.executable, "-m", *words], env=OFFLINE, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    there = {**os.environ, "PYTHONPATH": str(place)}
    command = place / "bin/halation"
    told = subprocess.run([command, "--version"], env=there, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout) == (0, f"halation {halation.__version__}\n"), told.stderr
    lookup = "from halation.models.model_path_resolver import resolve_model;"
    lookup += " print(resolve_model('streets-64', raw=False).load_args['path'])"
    found = subprocess.run(
        [sys.executable, "-c", lookup], env=there, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.strip() == str(place / "halation/models/bundled/streets-64"), found.stderr


@pytest.mark.slow
@no_setuptools
def test_a_source_archive_holds_what_a_wheel_is_made_of(source: Path) -> None:
    build = "from setuptools import build_meta; print(build_meta.build_sdist('built'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    with tarfile.open(source / "built" / done.stdout.splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in wanted()} <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_a_citation_says_what_the_package_says() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation.keys() >= {"message", "title", "authors"}, "what the format asks for"
    assert citation["version"] == halation.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "Halation contributors"}]
