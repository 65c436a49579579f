"""Everything or nothing: interruptions, full disks and crowds leave no half-made corpus."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from material import Prepare, document, text_settings, write_jsonl

from tfive.errors import UserError
from tfive.text import corpus as corpus_module
from tfive.text.files import ArrayWriter, Staging, write_errors
from tfive.text.prepared import PreparedCorpus
from tfive.text.tokens import TextTokenizer

SCRIPT = """
import os, resource, sys
from pathlib import Path
sys.path.insert(0, {material!r})
from material import ROLES, text_settings
from tfive.errors import UserError
from tfive.text import files
from tfive.text.corpus import prepare
from tfive.text.tokens import TextTokenizer
folder = Path({folder!r})
tokenizer = TextTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"), 0)
settings = text_settings([{{"name": "s", "path": str(folder / "a.jsonl")}}])
{before}
try:
    print(prepare(settings, horizon=4, roles=ROLES, tokenizer=tokenizer, cache=folder / "cache").folder)
except UserError as error:
    print("refused:", error)
"""


@pytest.fixture
def folder(tmp_path: Path, tokenizer: TextTokenizer) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [document(n) for n in range(150)])
    (tmp_path / "tokenizer.json").write_text(tokenizer.serialized, encoding="utf-8")
    return tmp_path


def in_another_process(folder: Path, before: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(material=str(Path(__file__).parent), folder=str(folder), before=textwrap.dedent(before))
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def source(folder: Path) -> list[dict[str, Any]]:
    return [{"name": "s", "path": str(folder / "a.jsonl")}]


def test_a_full_disk_is_one_line_and_leaves_nothing(folder: Path) -> None:
    done = in_another_process(folder, "resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))")
    assert done.stdout.startswith("refused: ")
    assert "no disk space left" in done.stdout
    assert "set text.cache" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert list((folder / "cache").iterdir()) == []


def test_a_killed_process_leaves_nothing_that_counts(folder: Path, prepared: Prepare) -> None:
    done = in_another_process(folder, "files.Staging.publish = lambda self, name=None: os._exit(9)")
    assert done.returncode == 9
    left = list((folder / "cache").iterdir())
    assert [path.name[-8:] for path in left] == [".partial"]
    corpus = prepared(text_settings(source(folder)), cache=folder / "cache")
    assert left == [folder / "cache" / f".{corpus.folder.name}.partial"]
    assert list((folder / "cache").iterdir()) == [corpus.folder]


@pytest.mark.parametrize("where", ["scan", "fill", "pack", "sha256", "shutil"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_whatever_happens_on_the_way_leaves_nothing(
    folder: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    expected = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patch:
        target = "tfive.text.corpus.shutil.rmtree" if where == "shutil" else f"tfive.text.corpus.{where}"
        calls = []
        real = corpus_module.shutil.rmtree

        def fail_once(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) > 1:
                return real(*arguments)
            raise error

        patch.setattr(target, fail_once if where == "shutil" else fail)
        with pytest.raises(expected):
            prepared(text_settings(source(folder)))
    assert list((folder / "cache").iterdir()) == []
    assert len(prepared(text_settings(source(folder)))) == 28


def test_a_crowd_prepares_once(folder: Path, prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    build = corpus_module._build

    def counted(*arguments: Any) -> Any:
        builds.append(threading.get_ident())
        return build(*arguments)

    monkeypatch.setattr(corpus_module, "_build", counted)
    found: list[PreparedCorpus] = []
    crowd = [threading.Thread(target=lambda: found.append(prepared(text_settings(source(folder))))) for _ in range(4)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert len(builds) == 1
    assert len({corpus.folder for corpus in found}) == 1
    assert len(found) == 4
    assert list((folder / "cache").iterdir()) == [found[0].folder]


def test_staging_publishes_a_file_or_a_folder(tmp_path: Path) -> None:
    with Staging(tmp_path / "deep" / "one.txt") as staging:
        (staging.path / "rows").write_text("x")
        staging.publish("rows")
    with Staging(tmp_path / "deep" / "two") as staging:
        (staging.path / "inner").mkdir()
        (staging.path / "inner" / "a").write_text("y")
        staging.publish()
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["deep/one.txt", "deep/two/inner/a"]


def test_write_errors_tell_a_full_disk_from_a_closed_door(tmp_path: Path) -> None:
    for number, text in [
        (errno.ENOSPC, "no disk space"),
        (errno.EDQUOT, "no disk space"),
        (errno.EACCES, "cannot write"),
    ]:
        with pytest.raises(UserError, match=text), write_errors(tmp_path):
            raise OSError(number, "reason")


def test_arrays_are_written_row_by_row(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.int64).reshape(6, 2)
    with ArrayWriter(tmp_path / "a.npy", values.shape, "<i4") as writer:
        writer.write(values[:4])
        writer.write(values[4:])
    assert (np.load(tmp_path / "a.npy") == values).all()
    with (
        pytest.raises(ValueError, match="2 rows written, 6 announced"),
        ArrayWriter(tmp_path / "b.npy", (6, 2), "<i4") as writer,
    ):
        writer.write(values[:2])


def test_a_folder_that_was_published_between_two_looks_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process held the folder when ours wanted to make it, and had renamed it by the time ours opened it."""
    real, seen = os.mkdir, []

    def mkdir(path: Any, *arguments: Any) -> None:
        seen.extend([path] if str(path).endswith(".partial") else [])
        if len(seen) == 1 and path == seen[0]:
            raise FileExistsError(17, "File exists")
        real(path, *arguments)

    monkeypatch.setattr("tfive.text.files.os.mkdir", mkdir)
    with Staging(tmp_path / "corpus") as staging:
        (staging.path / "a").write_text("b")
        staging.publish()
    assert (tmp_path / "corpus" / "a").read_text() == "b"
    assert len(seen) == 2


def test_what_cannot_be_cleared_or_entered_is_told_and_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".b.partial").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot write here"), Staging(tmp_path / "b"):
        pass
    (tmp_path / ".a.partial" / "left").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr("tfive.text.files.shutil.rmtree", lambda path: os.listdir(tmp_path / "absent"))
        with pytest.raises(UserError, match="cannot write here"), Staging(tmp_path / "a"):
            pass
    with Staging(tmp_path / "a") as staging:
        assert not list(staging.path.iterdir())
