"""A rank that hangs in an evaluation, or while it loads, is named in one line, and all ranks end."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from test_faults import SETTINGS, ended, home, started
from test_meeting import colours

from tfive.cli.app import _call

__all__ = ["home"]

SECONDS = "15"
"""Without a sign until a rank counts as hung: more than a busy machine takes for anything here."""

SMALL = ("--texts", "4", "--tokens", "24", "--device", "cpu", "--timeout", SECONDS)


def test_a_rank_that_hangs_in_an_evaluation_or_while_it_loads_is_named(home: Path) -> None:
    colours(home)
    model, text = str(home / "model"), ("--corpus", str(home / "corpus.jsonl"))
    tasks = ("--tasks", "colours", "--data", str(home), "--device", "cpu", "--timeout", SECONDS)
    out = ("--out", str(home / "evaluated"))
    sets = [word for one in (*SETTINGS, f"distributed.timeout={SECONDS}") for word in ("--set", one)]
    trained = ("train", str(home / "tiny.toml"), *sets, "--restarts", "0", "--out", str(home / "loading"))
    # What is typed, the rank that stops, where, and the phases in which the others may have heard of it last.
    cases: list[tuple[tuple[str, ...], int, str, str]] = [
        (("eval", "gains", model, *text, *SMALL), 1, "at:gains", "start|texts|gains"),
        (("eval", "headroom", model, *text, *SMALL, "--samples", "2"), 0, "at:headroom", "start|headroom"),
        (("eval", "run", model, *tasks, *out), 1, "at:colours", "start|colours"),
        (("eval", "run", model, *tasks, "--out", str(home / "none")), 1, "meets:evaluation", "start"),
        (trained, 0, "meets:model", "start"),
    ]
    # All at once: each does nothing but wait.
    launched = [started(*words, faults=((0, rank, where, "stop"),)) for words, rank, where, _ in cases]
    for launcher, (words, rank, _, phases) in zip(launched, cases):
        status, said = ended(launcher)
        assert status == 1, said
        hung, after = [line for line in said if "rank" in line]
        limit = "--timeout" if words[0] == "eval" else "distributed.timeout"
        found = re.fullmatch(
            rf"tfive: error: rank {rank} of 2 \(process (\d+) on .+\) last heard of in phase ({phases}).*: no sign for "
            rf"{SECONDS} s; all ranks end \(a slower machine needs a larger {limit}\)",
            hung,
        )
        assert found, said
        assert not os.path.exists(f"/proc/{found[1]}"), said
        then = "give the command again" if words[0] == "eval" else "go on with tfive resume"
        assert after == f"rank {rank} was ended by SIGKILL; {then}"
        assert [line for line in said if "Traceback" in line] == [], said
    assert not (home / "none").exists()


def test_a_signal_before_anything_can_be_saved_is_one_line(home: Path) -> None:
    sets = [word for one in SETTINGS for word in ("--set", one)]
    run = ("train", str(home / "tiny.toml"), *sets, "--out")
    gains = ("eval", "gains", str(home / "model"), "--corpus", str(home / "corpus.jsonl"), *SMALL)
    ended_by = "tfive: error: SIGTERM: all ranks have ended; "
    cases: list[tuple[tuple[str, ...], str, str, int, str]] = [
        ((*run, str(home / "a")), "meets:model", "interrupt", 130, "tfive: error: interrupted"),
        ((*run, str(home / "b")), "meets:model", "terminate", 1, f"{ended_by}go on with tfive resume"),
        (gains, "at:gains", "interrupt", 130, "tfive: error: interrupted"),
        (gains, "at:gains", "terminate", 1, f"{ended_by}give the command again"),
    ]
    launched = [started(*words, faults=((0, 1, where, deed),)) for words, where, deed, _, _ in cases]
    for launcher, (*_, status, line) in zip(launched, cases):
        found, said = ended(launcher)
        # The first rank may have said what it is about to do before the other one's signal came.
        begun, *others = said
        assert begun.startswith("starting 2 processes")
        assert (found, [one for one in others if not one.startswith("t5 on ")]) == (status, [line])


@pytest.mark.parametrize("command", ["run", "gains", "headroom"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e7", "soon"])
def test_a_time_limit_that_is_none_is_refused(command: str, seconds: str, capsys: pytest.CaptureFixture[Any]) -> None:
    corpus = [] if command == "run" else ["--corpus", "nano"]
    assert _call(["eval", command, "nano", *corpus, "--processes", "2", "--timeout", seconds]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--timeout" in line
