"""What a wheel and an sdist hold, and that a wheel runs without the checkout beside it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import tfive
from tfive.extras import install_hint

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


def build(folder: Path, what: str, out: Path) -> Path:
    code = f"from setuptools import build_meta as build; print(build.build_{what}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out / done.stdout.strip().splitlines()[-1]


def shipped() -> set[str]:
    """Every file of the packages as it lies in the checkout."""
    found = set()
    for package in ("tfive", "tfive_lab"):
        files = (file for file in (ROOT / "src" / package).rglob("*") if file.is_file())
        found |= {str(file.relative_to(ROOT / "src")) for file in files if "__pycache__" not in file.parts}
    return found


def packed(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as box:
        return {name for name in box.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return build(folder, "wheel", out), build(folder, "sdist", out)


def test_a_wheel_holds_every_file_of_the_packages(built: tuple[Path, Path]) -> None:
    assert packed(built[0]) == shipped()


def test_the_sdist_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as box:
        box.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    assert packed(build(folder, "wheel", tmp_path)) == shipped()


def test_an_unpacked_wheel_runs_away_from_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    with zipfile.ZipFile(built[0]) as box:
        box.extractall(site)
    outside = {**os.environ, "PYTHONPATH": str(site)}

    def python(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=here, env=outside, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert python("-c", "import tfive; print(tfive.__file__)").startswith(str(site))
    python("-m", "tfive", "config", "check", "nano")


def test_versions_agree() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert tfive.__version__ == declared


@pytest.mark.parametrize("extra", ["gguf", "parquet", "zstd", "hub", "eval", "figures", "tensorboard"])
def test_an_extras_hint_names_its_packages(extra: str) -> None:
    command = install_hint(extra)
    assert "tfive" not in command
    for requirement in EXTRAS[extra]:
        assert requirement.split(">=")[0] in command


def test_a_hint_without_metadata_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert install_hint("gguf") == "pip install 'tfive[gguf]'"


@pytest.mark.parametrize(("typed", "offered"), [("tfive tra", "train"), ("tfive train nan", "nano")])
def test_shells_complete_commands_and_presets(typed: str, offered: str) -> None:
    asked = {"_TFIVE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", "from tfive.cli.app import main; import sys; sys.argv[0] = 'tfive'; main()"],
        env={**os.environ, **asked}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert offered in done.stdout.split(), done.stderr
