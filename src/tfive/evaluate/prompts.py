"""How a model is asked: versioned few-shot prompts for base models, chat for instruct models, and log-likelihood.

A base model sees worked examples in one plain layout and then the question in the same layout; no chat template is
assumed. Every prompt says which version and which examples made it, so that two runs can be shown to have asked alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from tfive.errors import UserError
from tfive.evaluate.tasks import LETTERS, Item, Task


@dataclass(frozen=True)
class Prompt:
    """What a model is given for one item, and where its output ends."""

    text: str
    stop: tuple[str, ...]
    version: str
    demonstrations: tuple[str, ...]
    """Ids of the worked examples in it."""


@dataclass(frozen=True)
class Style:
    """One layout: the question, the worked answer after it, and the instruction a chat model gets instead."""

    question: str
    solution: str
    instruction: str


STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "words-v1": Style(
            question="Question: {question}\nAnswer:",
            solution=" {solution}\nThe answer is {answer}.",
            instruction="Solve the problem step by step. End with a line “The answer is N.”, N being the number alone.",
        ),
        "problem-v1": Style(
            question="Problem: {question}\nSolution:",
            solution=" {solution}",
            instruction="Solve the problem step by step. Put the final answer, and nothing else, in \\boxed{}.",
        ),
        "short-v1": Style(
            question="Question: {question}\nAnswer:",
            solution=" {solution}\nThe answer is {answer}.",
            instruction="Answer the question. End with a line “The answer is X.”, X being the answer alone.",
        ),
        "options-v1": Style(
            question="Question: {question}\n{options}\nAnswer:",
            solution=" {solution} The answer is {answer}.",
            instruction="Think step by step. End with a line “The answer is X.”, X being the right letter.",
        ),
    }
)
"""Prompt versions by name. A changed layout is a new name; an old name never changes its meaning."""


@dataclass(frozen=True)
class Demonstration:
    """A worked example from a training split."""

    item: Item
    solution: str


BARE = "{question}\nAnswer:\n"
"""What stands before a bare answer, which is one line; thoughts of answer-only texts stand there too."""


def prompt(task: Task, item: Item, tokenizer: Any = None, chat: bool = False, bare: bool = False) -> Prompt:
    """The prompt of one item: worked examples and the question, or one message in the tokenizer's chat template.

    `bare`: examples show their answers without the working, and so one line is the answer.
    """
    style = _style(task)
    if bare and chat:
        raise UserError("--bare-answers: shown by examples, which --chat leaves out; take one of the two")
    if bare:
        shown = demonstrations(task.demonstrations) if task.demonstrations else ()
        blocks = [_bare(style, one.item) + one.item.answer for one in shown]
        text = "\n\n".join([*blocks, _bare(style, item)])
        return Prompt(text, ("\n",), f"{task.prompt}-bare", tuple(one.item.id for one in shown))
    if chat:
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise UserError("chat mode: the tokenizer has no chat template; ask the model without chat mode")
        body = style.question.rsplit("\n", 1)[0].format(question=item.question.strip(), options=lettered(item))
        message = {"role": "user", "content": f"{style.instruction}\n\n{body}"}
        try:
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        except Exception as error:
            # A template is a program of the model's, in transformers' sandbox: it can fail in any way.
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(f"chat mode: the chat template fails ({reason}); ask without chat mode") from error
        return Prompt(text, (), f"{task.prompt}-chat", ())
    shown = demonstrations(task.demonstrations) if task.demonstrations else ()
    blocks = [_asked(style, one.item) + _answered(style, one) for one in shown]
    text = "\n\n".join([*blocks, _asked(style, item)])
    return Prompt(text, task.stop, task.prompt, tuple(one.item.id for one in shown))


def options(task: Task, item: Item) -> list[tuple[str, str]]:
    """Context and continuation of every option, for comparison by log-likelihood.

    They are the strings lm-evaluation-harness builds for its task of the same benchmark, without worked examples; its
    length-normalised score divides by the number of characters of the continuation without its leading space.
    """
    if task.kind != "choice" or task.context is None:
        raise UserError(f"task {task.name}: has no options to compare by log-likelihood")
    letters = task.continuation == "letter"
    subject = item.extra.get("subject", item.extra.get("category", "")).replace("_", " ")
    question = item.question.strip() if letters else item.question
    context = task.context.format(question=question, options=lettered(item), subject=subject)
    shown = LETTERS[: len(item.choices)] if letters else item.choices
    return [(context, f" {one}") for one in shown]


def lettered(item: Item) -> str:
    """The options one below the other, each after its letter."""
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, item.choices))


@cache
def demonstrations(pool: str) -> tuple[Demonstration, ...]:
    """The worked examples of a pool, in their fixed order."""
    pools = _pools()
    if pool not in pools:
        raise UserError(f"demonstrations {pool!r}: no such pool; there are {', '.join(pools)}")
    return tuple(
        Demonstration(Item(row["id"], row["question"], row["answer"], tuple(row.get("choices", ()))), row["solution"])
        for row in pools[pool]["examples"]
    )


@cache
def _pools() -> dict[str, Any]:
    path = files("tfive") / "data" / "evaluate" / "demonstrations.json"
    pools: dict[str, Any] = json.loads(path.read_text("utf-8"))["pools"]
    return pools


def _style(task: Task) -> Style:
    if task.prompt not in STYLES:
        raise UserError(f"task {task.name}: prompt {task.prompt!r} is not known; known are {', '.join(STYLES)}")
    return STYLES[task.prompt]


def _bare(style: Style, item: Item) -> str:
    layout = style.question.rsplit("\n", 1)[0]
    return BARE.format(question=layout.format(question=item.question.strip(), options=lettered(item)))


def _asked(style: Style, item: Item) -> str:
    return style.question.format(question=item.question.strip(), options=lettered(item))


def _answered(style: Style, shown: Demonstration) -> str:
    return style.solution.format(solution=shown.solution, answer=shown.item.answer)
