"""The files of the page on several processes: shells parse them, Slurm knows their keys, tfive their options."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from docs_check import make_targets, parse_error

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "howto" / "cluster"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sh", ".slurm"))

SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "time", "signal", "requeue",
    "output", "partition", "account", "exclusive",
}  # fmt: skip
"""Keys of sbatch that these files may use."""

TORCHRUN = {
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "max-restarts",
}  # fmt: skip


def test_there_is_a_file_for_slurm_and_one_without() -> None:
    assert [path.name for path in FILES] == ["tfive.slurm", "torchrun.sh"]
    page = (FOLDER.parent / "cluster.md").read_text("utf-8")
    assert all(f"(cluster/{path.name})" in page for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shell_parses_it_and_every_variable_is_quoted(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False).stderr == ""
    text = path.read_text("utf-8")
    assert text.startswith("#!/bin/bash\n")
    assert "set -euo pipefail" in text
    for line in text.splitlines():
        code = line.split("#")[0] if not line.startswith("#") else ""
        bare = re.sub(r'"[^"]*"|\$\([^)]*\)|^\w+=\S+', "", code.strip())
        assert "$" not in bare, f"{path.name}: unquoted in: {line}"


def test_slurm_keys_are_known_and_stand_before_the_first_command() -> None:
    lines = (FOLDER / "tfive.slurm").read_text("utf-8").splitlines()
    marked = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(marked) < first
    found = [re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", lines[number]) for number in marked]
    assert all(found)
    assert {match[1] for match in found if match} <= SBATCH


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_torchrun_and_tfive_know_the_options(path: Path) -> None:
    joined = path.read_text("utf-8").replace("\\\n", " ")
    (line,) = [line for line in joined.splitlines() if re.match(r"(exec|srun) ", line)]
    launcher, _, command = line.partition(" -m tfive ")
    options = set(re.findall(r"--([a-z-]+)", launcher.partition("torchrun")[2]))
    assert options == TORCHRUN
    spelled = re.findall(r"COMMAND=\((.*)\)", joined) or [command]
    targets = make_targets((ROOT / "Makefile").read_text("utf-8"))
    for words in spelled:
        assert parse_error(["tfive", *shlex.split(words)], targets) is None
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in joined
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in joined
