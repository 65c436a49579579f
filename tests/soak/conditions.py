"""What else happens to a run: no space, no permission, a clock set back, files that change while they are read.

Each condition is tried on a run of T⁵. It may end with status 1 or 2, in one line; afterwards, with the condition gone,
the run goes on and must end bit for bit where an undisturbed one does. Each returns a word for how it went.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fuzz.world import ROLES
from soak.life import FAILED, FINE, REFUSED, Death, compare, live
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.text.corpus import prepare
from tfive.text.settings import TextSettings
from tfive.training.checkpoint import POINTS, CheckpointStore
from tfive.training.export import export
from tfive.training.recorder import Recorder
from tfive.training.run_folder import CHECKPOINTS
from tiny import document, tokenizer

NOBODY = 65534
SAID = {FINE: "went through", FAILED: "status 1", REFUSED: "status 2"}

Condition = Callable[[Path, Config, Path, random.Random], str]


def _new(home: Path, name: str) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(home / name, ignore_errors=True)
    return home / name


def _afterwards(folder: Path, config: Config, undisturbed: Path) -> None:
    """With the condition gone the run comes to its end, the same to the bit."""
    status, where = live(folder, config)
    assert status == FINE, f"{folder}: could not go on, status {status} in {where}"
    compare(undisturbed, folder)
    shutil.rmtree(folder)


def full_disk(home: Path, config: Config, undisturbed: Path, rng: random.Random) -> str:
    """No file may grow beyond a random size, as on a disk that fills up in the middle of a write."""
    folder = _new(home, "full-disk")
    largest = max(path.stat().st_size for path in undisturbed.rglob("*") if path.is_file())
    limit = rng.randrange(256, largest)

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    status, where = live(folder, config, before=small)
    assert status in SAID, f"with files of at most {limit} bytes: status {status} in {where}"
    _afterwards(folder, config, undisturbed)
    return SAID[status]


def read_only_folder(home: Path, config: Config, undisturbed: Path, rng: random.Random) -> str:
    """A run that was killed is resumed while its folder may only be read."""
    folder = _new(home, "read-only")
    reason = _unprivileged(home, config)
    if reason:
        return reason
    live(folder, config, before=_drop, death=Death(point=rng.choice(POINTS[2:]), count=rng.randrange(2, 6)))
    closed = [folder, folder / CHECKPOINTS, *(folder / CHECKPOINTS).iterdir()]
    for path in closed:
        path.chmod(0o555)
    status, where = live(folder, config, before=_drop)
    for path in closed:
        path.chmod(0o755)
    assert status in (FAILED, REFUSED), f"a read-only folder: status {status} in {where}"
    _afterwards(folder, config, undisturbed)
    return SAID[status]


def lost_permissions(home: Path, config: Config, undisturbed: Path, rng: random.Random) -> str:
    """The folder of checkpoints is closed to everyone while the run goes on."""
    folder = _new(home, "permissions")
    reason = _unprivileged(home, config)
    if reason:
        return reason
    left = rng.randrange(1, 40)

    def close(where: str) -> None:
        nonlocal left
        left -= 1
        if left == 0 and (folder / CHECKPOINTS).is_dir():
            (folder / CHECKPOINTS).chmod(0)

    status, where = live(folder, config, before=_drop, hook=close)
    if (folder / CHECKPOINTS).is_dir():
        (folder / CHECKPOINTS).chmod(0o755)
    assert status in SAID, f"lost permissions: status {status} in {where}"
    _afterwards(folder, config, undisturbed)
    return SAID[status]


def _drop() -> None:
    """Become nobody, whom permissions bind; root is not bound by them."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _unprivileged(home: Path, config: Config) -> str | None:
    """Why permissions cannot be tried here; None when an unprivileged process can do a whole run."""
    if os.geteuid() != 0:
        return None
    home.chmod(0o777)
    for path in Path(config.model.name).iterdir():
        path.chmod(0o644)
    probe = _new(home, "probe")
    status, where = live(probe, config, before=_drop)
    shutil.rmtree(probe, ignore_errors=True)
    return None if status == FINE else f"skipped (as root; nobody cannot read what a run needs: {where})"


def clock_set_back(home: Path, config: Config, undisturbed: Path, rng: random.Random) -> str:
    """The clock jumps back by up to a day at random calls, the files seem to come from the future, and it is killed."""
    folder = _new(home, "clock")
    number = rng.randrange(10**9)

    def back() -> None:
        drawn, real, behind = random.Random(number), time.time, 0.0

        def now() -> float:
            nonlocal behind
            behind += drawn.uniform(0, 86_400) if drawn.random() < 0.2 else 0.0
            return real() - behind

        time.time = now
        defaults = Recorder.__init__.__kwdefaults__
        assert defaults is not None
        defaults["clock"] = now

    live(folder, config, before=back, death=Death(point=rng.choice(POINTS), count=rng.randrange(1, 5)))
    future = time.time() + 10**8
    for path in folder.rglob("*"):
        os.utime(path, (future, future))
    status, where = live(folder, config, before=back)
    assert status == FINE, f"a clock set back: status {status} in {where}"
    compare(undisturbed, folder)
    shutil.rmtree(folder)
    return "the same to the bit"


def text_that_changes(home: Path, config: Config, undisturbed: Path, rng: random.Random) -> str:
    """A corpus is prepared while its source is replaced again and again by another one."""
    folder = _new(home, "text")
    folder.mkdir()
    numbers = (range(80), range(1000, 1080))
    versions = ["".join(json.dumps({"text": document(one)}) + "\n" for one in some).encode() for some in numbers]
    path = folder / "source.jsonl"
    path.write_bytes(versions[0])
    over = threading.Event()

    def meddle() -> None:
        drawn = random.Random(rng.randrange(10**9))
        while not over.is_set():
            time.sleep(drawn.uniform(0, 0.02))
            path.write_bytes(versions[drawn.randrange(2)][: drawn.choice([None, None, 5000])])

    meddler = threading.Thread(target=meddle)
    meddler.start()
    outcomes: Counter[str] = Counter()
    try:
        for number in range(10):
            settings = TextSettings.model_validate(
                {
                    "sources": [{"name": "a", "path": str(path)}],
                    "sequence_length": 32,
                    "sequences": {"train": 16, "calibration": 4, "development": 4},
                    "allow_fewer": True,
                }
            )
            try:
                prepare(settings, horizon=3, roles=ROLES, tokenizer=tokenizer(), cache=folder / f"cache-{number}")
                outcomes["went through"] += 1
            except UserError:
                outcomes["status 2"] += 1
    finally:
        over.set()
        meddler.join()
    return "both" if len(outcomes) == 2 else next(iter(outcomes))


def read_while_written(home: Path, config: Config, undisturbed: Path, rng: random.Random) -> str:
    """Checkpoints are read and exported, again and again, while the run that writes and prunes them goes on."""
    folder = _new(home, "read")
    ended = threading.Event()
    result: list[tuple[int | None, str]] = []

    def write() -> None:
        result.append(live(folder, config))
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    number = 0
    while not ended.is_set():
        store, out = CheckpointStore(folder / CHECKPOINTS), home / f"exported-{number}"
        number += 1
        had = bool(store.paths())
        found = store.newest()
        assert not had or found.checkpoint is not None, f"no checkpoint was whole: {found.damaged}"
        with contextlib.suppress(UserError):  # nothing was saved yet, or the one that was read is gone
            export(folder, out)
        shutil.rmtree(out, ignore_errors=True)
        time.sleep(rng.uniform(0, 0.02))
    writer.join()
    assert result[0][0] == FINE, result
    compare(undisturbed, folder)
    shutil.rmtree(folder)
    return "the same to the bit"


CONDITIONS: dict[str, Condition] = {
    "full disk": full_disk,
    "read-only folder": read_only_folder,
    "lost permissions": lost_permissions,
    "clock set back": clock_set_back,
    "text that changes": text_that_changes,
    "read while written": read_while_written,
}
