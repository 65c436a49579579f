"""Processes that meet before they begin: what one refuses, all refuse, and one says it. Threads stand for processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tiny
from tfive.cli import evaluate_gains, evaluate_headroom, evaluate_suite
from tfive.cli.app import _call
from tfive.distributed.environment import SAID, Launched, PeerLost
from tfive.distributed.meeting import Meeting, StoreMeeting, meeting
from tfive.errors import UserError
from tfive.text.sources import SourceFile
from tfive.training.agreement import (
    code_digest,
    of_configuration,
    of_data,
    require_same,
    require_same_evaluation,
)

SIZE = 3

TASK = """name = "colours"
kind = "choice"
count = 1
file = "colours.jsonl"
prompt = "options-v1"
context = "{question}"
continuation = "text"
"""


def colours(folder: Path) -> None:
    """A task of one item."""
    (folder / "colours.task.toml").write_text(TASK, "utf-8")
    row = '{"id": "1", "question": "boat", "choices": ["river", "mill"], "answer": 0}'
    (folder / "colours.jsonl").write_text(f"{row}\n", "utf-8")


def meet(work: Callable[[StoreMeeting], Any]) -> list[Any]:
    """What `work` returns or raises on each of three ranks that share a store."""
    store = dist.HashStore()
    found: list[Any] = [None] * SIZE

    def rank(number: int) -> None:
        try:
            found[number] = work(StoreMeeting(Launched(number, SIZE), store))
        except (UserError, PeerLost) as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_texts_come_by_rank_and_a_line_is_said_once() -> None:
    assert (
        meet(lambda met: met.exchange("words", f"rank {met.place.rank} ↔"))
        == [["rank 0 ↔", "rank 1 ↔", "rank 2 ↔"]] * 3
    )
    assert sorted(meet(lambda met: met.says_first("the same line"))) == [False, False, True]
    assert meet(lambda met: met.says_first(f"line {met.place.rank}")) == [True] * 3


def test_the_first_works_before_the_others_begin() -> None:
    order: list[int] = []

    def work(met: StoreMeeting) -> int:
        order.append(met.place.rank)
        return met.place.rank

    assert meet(lambda met: met.first_alone("text", lambda: work(met))) == [0, 1, 2]
    assert order[0] == 0


def test_a_refusal_of_one_is_raised_by_all() -> None:
    def work(met: StoreMeeting, refuse: tuple[int, ...], error: Exception) -> None:
        with met.refusals("files"):
            if met.place.rank in refuse:
                raise error

    missing = FileNotFoundError(2, "No such file or directory", "text.jsonl")
    for refuse, error, said in (
        ((1, 2), UserError("no such key"), "rank 1: no such key"),
        ((0, 1, 2), UserError("no such key"), "no such key"),
        ((2,), missing, "rank 2: text.jsonl: No such file or directory"),
    ):
        found = meet(lambda met, refuse=refuse, error=error: work(met, refuse, error))  # type: ignore[misc]
        assert [(type(one), str(one)) for one in found] == [(UserError, said)] * 3
    assert meet(lambda met: work(met, (), missing)) == [None] * 3


def test_other_settings_code_or_data_are_named(tmp_path: Path) -> None:
    config = tiny.configure(tmp_path)
    same = of_configuration(config)
    assert same["run.seed"] == "0"
    assert f"code {code_digest()}" in same["tfive"]

    def differing(changes: dict[str, str]) -> list[str]:
        own = lambda met: same | (changes if met.place.rank == 2 else {})  # noqa: E731
        return [str(one) for one in meet(lambda met: require_same(met, "settings", own(met), "mend it"))]

    assert differing({}) == ["None"] * 3
    assert differing({"run.seed": "1"}) == ["rank 2: run.seed = 1, rank 0 has 0; mend it"] * 3
    assert differing({"torch": "2.12"})[0].startswith("rank 2: torch = 2.12, rank 0 has 2.13")
    assert differing({"more": "x"}) == ["rank 2: more = x, rank 0 has nothing; mend it"] * 3
    assert of_data({"model.safetensors": "ab"}, "cd") == {"model file model.safetensors": "ab", "prepared corpus": "cd"}


def test_evaluations_of_other_options_texts_or_weights_are_named(tmp_path: Path) -> None:
    models, paths = [torch.nn.Linear(2, 1) for _ in range(2)], [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, path in enumerate(paths):
        path.write_text(f"text {number}\n")

    def compared(seed: int = 0, model: int = 0, text: int = 0) -> str:
        def work(met: StoreMeeting) -> None:
            other = met.place.rank == 1
            files = [SourceFile("a", paths[text * other], "a.txt")]
            require_same_evaluation(met, {"seed": seed * other}, models[model * other], files)

        lines = {str(one) for one in meet(work)}
        (line,) = lines
        return line

    assert compared() == "None"
    assert compared(seed=4) == "rank 1: seed = 4, rank 0 has 0; give all ranks the same options, files and versions"
    assert compared(text=1).startswith("rank 1: text a.txt = ")
    assert compared(model=1).startswith("rank 1: weights = ")
    paths[1].unlink()
    assert compared(text=1).startswith(f"rank 1: {paths[1]}: cannot be read")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (evaluate_suite, ["run", "--tasks", "colours", "--data", "."]),
        (evaluate_gains, ["gains", "--corpus", "nano", "--texts", "4", "--tokens", "32"]),
        (evaluate_headroom, ["headroom", "--corpus", "nano", "--texts", "4", "--tokens", "32"]),
    ],
)
def test_every_evaluation_is_compared_before_it_begins(
    module: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refused(*given: Any) -> None:
        raise UserError("compared")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "require_same_evaluation", refused)
    colours(tmp_path)
    assert _call(["eval", words[0], "nano", *words[1:], "--device", "cpu"]) == 2
    assert capsys.readouterr().err.splitlines() == ["tfive: error: compared"]
    assert not (tmp_path / "evaluations").exists()


def test_code_is_told_by_its_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    first = code_digest(tmp_path)
    assert first == code_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    second = code_digest(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, code_digest(tmp_path)}) == 3


def test_ranks_that_never_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(PeerLost, match=r"rank 0 of 2: not all ranks have come within 1 s"),
        meeting(Launched(0, 2), 1.0),
    ):
        pass


def test_one_process_meets_itself() -> None:
    met = Meeting(Launched())
    assert met.exchange("words", "mine") == ["mine"]
    assert met.says_first("line")
    assert met.first_alone("work", lambda: 3) == 3
    with pytest.raises(UserError, match="alone") as raised, meeting(Launched()) as alone, alone.refusals("files"):
        raise UserError("alone")
    assert not hasattr(raised.value, SAID)
