"""Where metrics go besides the JSON lines: TensorBoard where it is installed, W&B and trackio where they are named."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tfive.errors import UserError
from tfive.extras import install_hint

SAMPLE = ("before", "thought", "after")
"""What is told of a thought: the text before it, what it says, the text after it."""


def _cell(text: str) -> str:
    """Text inside a Markdown table, as code so that nothing in it is markup."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return "`" + plain.replace("`", "'").replace("|", "¦") + "`"


class Tracker(Protocol):
    """One tracker."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Take the numbers of one step."""

    def samples(self, rows: Sequence[Mapping[str, str]], step: int) -> None:
        """Take a few thoughts, with what stands before and after them."""

    def close(self) -> None:
        """Write what is still buffered."""


class TensorBoard:
    """Event files in `folder/tensorboard`."""

    def __init__(self, folder: Path, name: str, project: str, config: Mapping[str, Any]) -> None:
        writer = importlib.import_module("torch.utils.tensorboard")
        self._writer = writer.SummaryWriter(log_dir=str(folder / "tensorboard"))

    def write(self, values: Mapping[str, float], step: int) -> None:
        """One scalar per name; the first dot becomes the slash by which TensorBoard groups its charts."""
        for name, value in values.items():
            self._writer.add_scalar(name.replace(".", "/", 1), value, step)

    def samples(self, rows: Sequence[Mapping[str, str]], step: int) -> None:
        """A Markdown table, one row a thought."""
        lines = ["| " + " | ".join(_cell(row[name]) for name in SAMPLE) + " |" for row in rows]
        head = ["| " + " | ".join(SAMPLE) + " |", "|" + "---|" * len(SAMPLE)]
        self._writer.add_text("thoughts", "\n".join([*head, *lines]), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run; its id is the run's name, so that a resumed run continues the same record."""

    def __init__(self, folder: Path, name: str, project: str, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project, name=name, id=name, dir=str(folder.resolve()), config=dict(config), resume="allow"
        )

    def write(self, values: Mapping[str, float], step: int) -> None:
        """All names of the step in one record."""
        self._run.log(dict(values), step=step)

    def samples(self, rows: Sequence[Mapping[str, str]], step: int) -> None:
        """A table, one row a thought."""
        table = importlib.import_module("wandb").Table(list(SAMPLE), [[row[name] for name in SAMPLE] for row in rows])
        self._run.log({"thoughts": table}, step=step)

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()


class Trackio:
    """A trackio run, kept on this machine unless trackio is configured otherwise."""

    def __init__(self, folder: Path, name: str, project: str, config: Mapping[str, Any]) -> None:
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(project=project, name=name, config=dict(config), resume="allow")

    def write(self, values: Mapping[str, float], step: int) -> None:
        """All names of the step in one record."""
        self._trackio.log(dict(values), step=step)

    def samples(self, rows: Sequence[Mapping[str, str]], step: int) -> None:
        """One text a thought."""
        shown = {
            f"thoughts/{n}": " ⟨".join([row["before"], f"{row['thought']}⟩{row['after']}"])
            for n, row in enumerate(rows)
        }
        self._trackio.log(shown, step=step)

    def close(self) -> None:
        """End the run."""
        self._trackio.finish()


KINDS: dict[str, type[TensorBoard] | type[WeightsAndBiases] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def open_trackers(
    asked: Sequence[str], folder: Path, name: str, project: str, config: Mapping[str, Any]
) -> list[Tracker]:
    """The trackers of `run.trackers`, and TensorBoard if it is installed; one that is named but missing is an error."""
    for kind in asked:
        if importlib.util.find_spec(kind) is None:
            raise UserError(f"run.trackers = {kind}: not installed; {install_hint(kind)} or leave it out")
    wanted = list(dict.fromkeys(asked))
    if "tensorboard" not in wanted and importlib.util.find_spec("tensorboard") is not None:
        wanted.append("tensorboard")
    return [KINDS[kind](folder, name, project, config) for kind in wanted]
