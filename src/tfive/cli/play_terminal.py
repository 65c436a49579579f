"""`tfive play` in a terminal: lines are texts, lines that begin with a colon are commands."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tfive.errors import UserError
from tfive.inference.look import described, goes_on, look, question_from
from tfive.inference.thought_model import ThoughtModel
from tfive.printable import printable

HELP = """\
type a text, or its beginning; then
  :again           other thoughts (another seed)
  :off  :on        without thoughts, and with them
  :every :end      think regularly, or at the end alone
  :unsure :gate    think where it is unsure, or where the gate trusts the thought
  :think N …       think after these tokens (counted from 0)
  :at N            what it expects after token N
  :write           let it go on
  :quit            (or Ctrl-D)"""
WAYS = {":every": "every", ":end": "end", ":unsure": "unsure", ":gate": "gate", ":on": "every", ":off": "none"}
STRONG = 0.5
"""Nats from which a token's gain is shown in bold."""


class Terminal:
    """One conversation with a model: a text, where to think about it, and which random numbers."""

    def __init__(self, model: ThoughtModel, *, seed: int = 0, console: Console | None = None) -> None:
        width = shutil.get_terminal_size((100, 24)).columns
        self.model, self.console = model, console or Console(highlight=False, width=width)
        self.question: dict[str, Any] = {"text": "", "places": "every", "positions": [], "seed": seed}
        self.found: dict[str, Any] | None = None

    def run(self, lines: Sequence[str] | None = None) -> None:
        """Answer these lines, else those of the keyboard or of standard input until it ends; a bad one is told."""
        about = described(self.model)
        print(about["model"], file=sys.stderr)
        if not about["trained"]:
            print("nobody has trained these thoughts: expect them to say nothing useful", file=sys.stderr)
        for line in _typed() if lines is None else lines:
            if line.strip() in (":quit", ":q"):
                return
            try:
                self.answer(line)
            except UserError as error:
                if lines is not None:
                    raise
                print(error, file=sys.stderr)

    def answer(self, line: str) -> None:
        """Show what a line asks for."""
        if not line.strip():
            return
        command, *words = line.split()
        if not command.startswith(":"):
            self._look({"text": line.rstrip("\n"), "positions": []} | self._regular())
        elif command == ":help":
            self._print(Text(HELP))
        elif self.found is None:
            raise UserError(f"{command}: type a text first (:help lists what can be asked)")
        else:
            self._command(command, words)

    def _regular(self) -> dict[str, Any]:
        """Chosen places belong to one text; the next is thought about regularly again."""
        return {"places": "every"} if self.question["places"] == "chosen" else {}

    def _command(self, command: str, words: list[str]) -> None:
        if command == ":again":
            self._look({"seed": self.question["seed"] + 1})
        elif command in WAYS:
            self._look({"places": WAYS[command], "positions": []})
        elif command == ":think" and words:
            self._look({"places": "chosen", "positions": sorted({_number(word) for word in words})})
        elif command == ":at" and len(words) == 1:
            self._expected(_number(words[0]))
        elif command == ":write":
            found = goes_on(self.model, question_from({key: self.question[key] for key in ("text", "seed")}))
            self._print(Text.assemble(("without thoughts: ", "dim"), printable(found["without"])))
            self._print(Text.assemble(("with thoughts:    ", "dim"), printable(found["with"])))
        else:
            raise UserError(f"{command}: not a command; :help lists them")

    def _look(self, changes: dict[str, Any]) -> None:
        asked = self.question | changes
        self.found = look(self.model, question_from(asked))
        self.question = asked
        self._text(self.found)
        self._expected(len(self.found["tokens"]) - 1)

    def _text(self, found: dict[str, Any]) -> None:
        """The text with thoughts where they were had, coloured by what they change, and one line about it."""
        thoughts = {thought["position"]: thought["text"] for thought in found["thoughts"]}
        shown = Text()
        for place, token in enumerate(found["tokens"]):
            shown.append(printable(token), _style(found["predictions"][place - 1] if place else None))
            if place in thoughts:
                shown.append(f"⟨{printable(thoughts[place])}⟩", "italic cyan")
        self._print(shown)
        self._print(Text(_summary(found), "dim"))

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)

    def _expected(self, place: int) -> None:
        """A table of the likeliest tokens after one of the text's."""
        found = self.found
        assert found is not None
        last = len(found["tokens"]) - 1
        if not 0 <= place <= last:
            raise UserError(f":at {place}: this text has tokens 0 … {last}")
        prediction = found["predictions"][place]
        served = prediction["served"]
        columns = ["without", *(["with the thought"] if served else [])]
        mixes = served and self.model.gate is not None
        columns += [f"mixed (gate {prediction['gate']:.2f})"] if mixes else []
        self._print(Text(f"after token {place} {_quoted(found['tokens'][place])}:", "dim"))
        self._print(Text("  " + "next".ljust(16) + "".join(name.rjust(20) for name in columns), "dim"))
        for token, *values in prediction["top"]:
            numbers = values[:1] + (values[1:2] if served else []) + (values[2:] if mixes else [])
            line = "  " + _quoted(token).ljust(16) + "".join(f"{100 * value:.1f} %".rjust(20) for value in numbers)
            self._print(Text(line))


def _typed() -> Iterator[str]:
    """Lines of the keyboard, after a prompt, or of standard input."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    print(":help lists what can be asked; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            yield input("text> ")
        except EOFError:
            print(file=sys.stderr)
            return


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise UserError(f"{word}: give the number of a token, counted from 0") from error


def _quoted(token: str) -> str:
    return f"“{printable(token).replace(chr(10), '⏎').replace(chr(9), '⇥')}”"


def _style(prediction: dict[str, Any] | None) -> str:
    if prediction is None or not prediction["served"] or prediction["mixed"] is None:
        return ""
    gain = prediction["mixed"] - prediction["plain"]
    if math.isclose(gain, 0.0, abs_tol=0.01):
        return ""
    return f"{'bold ' if abs(gain) >= STRONG else ''}{'green' if gain > 0 else 'red'}"


def _summary(found: dict[str, Any]) -> str:
    thoughts, gain = len(found["thoughts"]), found["mean_gain"]
    if not thoughts:
        return "no thoughts"
    what = f"{thoughts} thought{'' if thoughts == 1 else 's'}, seed {found['seed']}"
    if not found["served"] or gain is None:
        return f"{what}; none serves a token of this text, only what comes after it"
    return f"{what}; {gain:+.4f} nats per token over the text (green: likelier with the thought, red: less likely)"
