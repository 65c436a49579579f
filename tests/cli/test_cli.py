"""The command line: help with examples, one line for bad input, exit statuses, JSON for programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command

from tfive import __version__
from tfive.cli import app as cli
from tfive.cli import show_config
from tfive.errors import RunFailed, UserError

GROUPS = ("config", "data", "bench")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    printed = capsys.readouterr()
    status = ended.value.code
    return int(status or 0), printed.out, printed.err


def commands() -> list[tuple[str, ...]]:
    """Every command there is, groups opened."""

    def below(command: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        inner = getattr(command, "commands", None)
        return [path] if inner is None else [found for name in inner for found in below(inner[name], (*path, name))]

    return below(get_command(cli.app), ())


COMMANDS = commands()


def test_a_command_without_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def short(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 3.00 GiB")

    monkeypatch.setattr(show_config, "check_config", short)
    status, _, said = call(capsys, "config", "check")
    assert status == 1
    (line,) = said.splitlines()
    assert "out of memory, ask for less" in line
    assert "3.00 GiB" in line


def test_the_foundation_s_commands_are_there() -> None:
    assert {("config", "show"), ("config", "check"), ("doctor",)} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_examples_that_name_it(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(capsys, *command, "--help")
    assert status == 0
    examples = out.partition("Examples:\n")[2]
    assert f"  tfive {' '.join(command)}" in examples


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("trian",), "No such command 'trian'"),
        (("config", "shw"), "show"),
        (("doctor", "--bogus"), "--bogus"),
        (("config", "show", "--set"), "--set"),
        (("config", "show", "absent"), "absent: no such preset"),
        (("config", "show", "absent.toml"), "absent.toml: No such file"),
        (("config", "show", "nano", "--set", "thought.lenght=3"), "did you mean thought.length?"),
        (("config", "check", "nano", "--set", "gae.alpha=-1"), "gae.alpha = -1"),
        (("doctor", "nano", "--set", "model.name=nobody/knows"), "model.name = nobody/knows"),
        (("bench", "engine", "--shape", "gpt-9"), "gpt-9"),
        (("bench", "engine", "--repeats", "0"), "--repeats"),
        (("bench", "selfcheck", "--device", "abacus"), "abacus"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(capsys, *words)
    assert status == 2
    assert out == ""
    assert err.startswith("tfive: error: ")
    assert err.count("\n") == 1
    assert part in err


def test_config_check_names_every_broken_rule(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("config", "check", "qwen3.5-2b", "--set", "gae.alpha=0.05", "--set", "thought.group=8")
    status, out, err = call(capsys, *words)
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("tfive: error: ") for line in lines)
    status, out, err = call(capsys, *words, "--json")
    assert (status, err) == (2, "")
    assert len(json.loads(out)["problems"]) == 2


def test_config_show_prints_a_file_that_shows_the_same_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(capsys, "config", "show", "nano", "--set", "thought.horizon=6")
    assert status == 0
    assert re.search(r"^horizon = 6 +# --set$", out, re.MULTILINE)
    assert "# preset nano" in out
    path = tmp_path / "shown.toml"
    path.write_text(out, encoding="utf-8")
    _, first, _ = call(capsys, "config", "show", "nano", "--set", "thought.horizon=6", "--explain", "--json")
    _, second, _ = call(capsys, "config", "show", str(path), "--json")
    values = [{key: entry["value"] for key, entry in json.loads(text).items()} for text in (first, second)]
    assert values[0] == values[1]


def test_version_help_and_bare_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version")[1].startswith("tfive ")
    assert call(capsys, "--help")[0] == 0
    for group in ((), *((name,) for name in GROUPS)):
        status, out, _ = call(capsys, *group)
        assert status == 2
        assert "Commands:" in out


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("thought.length = 0: use 1 or more"), 2, "thought.length = 0: use 1 or more"),
        (UserError("first\n  second"), 2, "first second"),
        (RunFailed("critics were not admitted in 5 attempts"), 1, "critics were not admitted in 5 attempts"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "runs/x"), 2, "runs/x: No space left on device"),
    ],
)
def test_each_kind_of_failure_has_its_status(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> str:
        raise error

    monkeypatch.setattr("tfive.cli.show_config.show_config", fails)
    assert call(capsys, "config", "show", "nano") == (status, "", f"tfive: error: {line}\n")


def test_an_interruption_of_several_processes_is_said_by_their_launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("tfive.cli.show_config.show_config", interrupted)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert call(capsys, "config", "show", "nano") == (130, "", "")


def test_a_defect_of_ours_is_not_dressed_as_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("tfive.cli.show_config.show_config", fails)
    with pytest.raises(ZeroDivisionError):
        cli.main(["config", "show", "nano"])


def test_python_m_tfive_is_the_command(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "tfive"]
    done = subprocess.run([*script, "--version"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tfive {__version__}\n", "")
    done = subprocess.run([*script, "trian"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("tfive: error: No such command 'trian'")


def test_the_shell_completes_commands() -> None:
    asked = {"_TFIVE_COMPLETE": "complete_bash", "COMP_WORDS": "tfive config s", "COMP_CWORD": "2"}
    words = [sys.executable, "-m", "tfive"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | asked)
    assert done.stdout.split() == ["show", "schema"]


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = f"{sys.executable} -m tfive config show nano | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("method = ")
    assert done.stderr == ""


def test_output_survives_a_terminal_that_knows_only_ascii() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfive", "config", "check", "qwen3.5-2b", "--set", "gae.alpha=0.05"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        check=False,
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


@given(st.lists(st.text(max_size=12).filter(lambda word: not word.startswith("-")), min_size=1, max_size=3))
@settings(max_examples=50)
def test_any_words_after_config_show_end_in_status_0_or_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["config", "show", *words])
    assert ended.value.code in (0, 2)
