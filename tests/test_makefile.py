"""The Makefile: what `make test` runs and in which order, which files mypy sees, and what `make clean` removes."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The repository's own folders, empty, with environments that look finished."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    for folder in folders:
        (tmp_path / folder.name).mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    for stamp in ("run", "test", "lint", "page"):
        (tmp_path / ".venv" / f"{stamp}.stamp").touch()
    return tmp_path


def make(folder: Path, *words: str) -> str:
    # `make test` itself is make: what it hands on to a make below it has no place here.
    handed = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "HASHED")
    outside = {name: value for name, value in os.environ.items() if name not in handed}
    done = subprocess.run(["make", *words], cwd=folder, env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_test_runs_all_that_contributing_promises_in_order(checkout: Path) -> None:
    lines = [line.removeprefix(".venv/bin/") for line in make(checkout, "-n", "test").splitlines()]
    assert lines == [
        "ruff check --quiet .",
        "ruff format --check --quiet .",
        "mypy --no-error-summary",
        "python -m pytest -n 3 --dist loadfile",
        "python tests/docs_check.py --short",
    ]


def test_make_test_page_runs_the_tests_that_need_a_browser(checkout: Path) -> None:
    (line,) = make(checkout, "-n", "test-page").splitlines()
    named = {ROOT / word for word in line.split() if word.endswith(".py")}
    needing = [file for file in (ROOT / "tests").rglob("test_*.py") if "\nimport browser" in file.read_text("utf-8")]
    assert named == set(needing)


def test_types_are_checked_in_every_folder_with_python_files() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    visible = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    present = {file for folder in visible if folder.name not in ("build", "runs") for file in folder.rglob("*.py")}
    checked = {file for name in settings["files"] for file in (ROOT / name).rglob("*.py")}
    assert present == checked
    # mypy leaves out the rooms' conftest.py, which share one name: fixtures live in modules with names of their own.
    for file in (ROOT / "tests").glob("*/**/conftest.py"):
        defined = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
        assert not defined, f"{file}: move {defined[0].name} to a module and import it here"


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_ci_runs_make_test_by_hashes_where_there_are_some(tmp_path: Path, version: str) -> None:
    for name, content in {
        "python3": f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0); exec(sys.argv[2])",
        "make": 'import os, sys; print(sys.argv[1:], os.environ.get("HASHED"))',
    }.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{content}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "HASHED"} | {"PATH": path}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True)
    linux = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    assert done.stdout.split() == ["['test']", "1" if linux and version == "3.11" else "None"]


def pins(name: str) -> dict[str, list[str]]:
    """Requirement → what stands after it, of every line that is no comment."""
    lines = [line.split() for line in (ROOT / name).read_text("utf-8").splitlines() if not line.startswith("#")]
    return {words[0].lower().replace("_", "-"): words[1:] for words in lines if words}


def test_every_pin_but_torch_has_a_hash() -> None:
    hashed, pinned = pins("hashes.txt"), pins("constraints.txt")
    assert set(hashed) == {pin for pin in pinned if not pin.startswith("torch==")}
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for words in hashed.values() for one in words)
    assert all(hashed.values())


def test_hashes_are_checked_before_anything_else_is_installed(checkout: Path) -> None:
    (checkout / ".venv" / "run.stamp").unlink()
    lines = [line for line in make(checkout, "-n", "HASHED=1", "test").splitlines() if "pip install" in line]
    assert "--require-hashes -r hashes.txt" in lines[0]
    assert all("--no-deps" in line for line in lines)
    assert not any("--require-hashes" in line for line in make(checkout, "-n", "test").splitlines())


def test_make_clean_removes_environments_and_caches_and_keeps_runs(checkout: Path) -> None:
    kept = [checkout / "runs" / "mine" / "summary.json", checkout / "src" / "module.py"]
    gone = [checkout / ".mypy_cache", checkout / "src" / "tfive.egg-info", checkout / "tests" / "deep" / "__pycache__"]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for path in gone:
        path.mkdir(parents=True)
        (path / "file").touch()
    assert make(checkout, "clean") == ""
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in (*gone, checkout / ".venv"))
    make(checkout, "clean")
