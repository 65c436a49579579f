"""The Dockerfile as far as it can be checked without building it."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
KNOWN = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
HOST = re.compile(r"https?:|\b(?:[a-z0-9-]+\.)+(?:com|dev|io|net|org)\b", re.IGNORECASE)


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its text; continued lines are joined, comments dropped."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def texts(name: str) -> list[str]:
    return [rest for word, rest in instructions() if word == name]


def test_it_uses_instructions_that_exist_in_an_order_that_works() -> None:
    names = [word for word, _ in instructions()]
    assert set(names) <= KNOWN
    assert names.index("ARG") < names.index("FROM") < names.index("COPY") < names.index("USER")
    assert names[-2:] == ["ENTRYPOINT", "CMD"]


def test_cpu_and_cuda_differ_by_the_base_alone() -> None:
    assert texts("FROM") == ["${BASE}"]
    assert texts("ARG")[0].startswith("BASE=python:3.")
    version = re.match(r"BASE=python:(3\.\d+)", texts("ARG")[0])
    assert version is not None
    assert f"Programming Language :: Python :: {version[1]}" in PROJECT["classifiers"]
    assert re.search(r"--build-arg BASE=nvidia/cuda:[\w.-]+", (ROOT / "Dockerfile").read_text("utf-8"))


def test_what_it_copies_is_there_and_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert ignored[0] == "*"
    copied = [source for rest in texts("COPY") for source in shlex.split(rest)[:-1]]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source
    # What the build of the package reads must be among it.
    assert {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)


def test_it_installs_extras_that_exist_and_starts_the_command() -> None:
    (extras,) = [rest.partition("=")[2] for rest in texts("ARG") if rest.startswith("EXTRAS=")]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert texts("ENTRYPOINT") == ['["tfive"]']
    assert "tfive" in PROJECT["scripts"]


def test_it_does_not_run_as_root_and_names_no_host() -> None:
    (user,) = texts("USER")
    assert user != "root"
    assert any(f"useradd --create-home --shell /bin/bash {user}" in rest for rest in texts("RUN"))
    assert HOST.search("see https://x") is not None
    for name in ("Dockerfile", ".dockerignore"):
        assert HOST.search((ROOT / name).read_text("utf-8")) is None, name
