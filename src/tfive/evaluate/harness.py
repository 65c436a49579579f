"""`tfive` as a model of lm-evaluation-harness, so that its own tasks can be asked of a model with hidden thoughts.

Importing this module registers the name; from a shell:

    python -m tfive.evaluate.harness --model tfive --model_args pretrained=out,thoughts=every=4 --tasks piqa

Exported folders also run there unchanged as plain models (`--model hf --model_args pretrained=out`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from tfive.errors import UserError
from tfive.evaluate.evaluated import load_evaluated
from tfive.evaluate.generate import Decoding, GenerationRequest, encoded, generate
from tfive.evaluate.likelihood import Likelihood, log_likelihoods
from tfive.inference.places import uncertain_places
from tfive.inference.requests import NEVER, When
from tfive.inference.thought_model import ThoughtModel
from tfive.models.precision import choose_device, choose_dtype

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names the harness uses for the longest output; the first one present counts."""


@register_model("tfive")
class HarnessModel(LM):
    """Answers the harness's three kinds of request.

    With thoughts, whether a continuation is the likeliest one is not computed and reported as False; accuracies of
    multiple choice and of generated answers do not use it.
    """

    def __init__(
        self,
        pretrained: str,
        thoughts: str = "none",
        device: str | None = "auto",
        compute: str = "auto",
        seed: int = 0,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        """`batch_size` and `max_batch_size` are the harness's and not needed: passes are filled to a token budget."""
        super().__init__()
        where = choose_device(device or "auto")
        self.model, self.when, self.name = load_evaluated(pretrained, thoughts, where, choose_dtype(compute, where))
        self.seed = int(seed)

    @classmethod
    def of(cls, model: ThoughtModel, when: When = NEVER, seed: int = 0) -> HarnessModel:
        """The same around a model that is already loaded."""
        made = cls.__new__(cls)
        LM.__init__(made)
        made.model, made.when, made.name, made.seed = model, when, "model", seed
        return made

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation; consecutive requests with one context share its forward pass."""
        groups: list[list[tuple[str, str]]] = []
        for request in requests:
            context, continuation = request.args
            if groups and groups[-1][0][0] == context:
                groups[-1].append((context, continuation))
            else:
                groups.append([(context, continuation)])
        found: dict[int, list[Likelihood]] = dict(log_likelihoods(self.model, groups, when=self.when, seed=self.seed))
        return [(one.total, one.likeliest) for number in range(len(groups)) for one in found[number]]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's length."""
        return [self._rolling(request.args[0]) for request in requests]

    def _rolling(self, text: str) -> float:
        tokenizer: Any = self.model.tokenizer
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if begin is None:
            raise UserError("the tokenizer has no token that begins a text; rolling log-likelihood needs one")
        windows = get_rolling_token_windows(encoded(tokenizer, text), begin, self._window(), 1)
        total = 0.0
        for context, predicted in map(make_disjoint_window, windows):
            row = [*context, *predicted]
            fixed = [list(range(0, len(row) - 1, self.when.every)) if self.when.every else []]
            places = fixed if self.when.entropy_above is None else self._uncertain
            (scores,) = self.model.score([row], places, seed=self.seed)
            total += float(scores.mixed[-len(predicted) :].double().sum())
        return total

    def _window(self) -> int:
        """Tokens predicted at a time: as many as the model has positions, less what thoughts take.

        A row holds one token more, which learned positions have no room for.
        """
        model = self.model
        if model.engine().backbone.position_limit is not None:
            return max(1, (model.limit or 2048) - model.plan.reach - 1)
        return (model.limit or 2048) - (model.plan.reach if self.when.ever else 0)

    def _uncertain(self, _: int, entropy: Tensor) -> list[int]:
        return uncertain_places(entropy, self.when.entropy_above or 0.0, self.model.plan.horizon)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Outputs, in the requests' order; those with the same settings are written together."""
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items(), key=lambda pair: pair[0])), []).append(number)
        texts: dict[int, str] = {}
        for numbers in alike.values():
            texts |= self._generated({n: requests[n].args[0] for n in numbers}, dict(requests[numbers[0]].args[1]))
        return [texts[number] for number in range(len(requests))]

    def _generated(self, prompts: dict[int, str], settings: dict[str, Any]) -> dict[int, str]:
        until = settings.get("until") or []
        stops = (until,) if isinstance(until, str) else tuple(until)
        most = int(next((settings[name] for name in _LENGTHS if settings.get(name)), 256))
        greedy = not settings.get("do_sample", bool(settings.get("temperature")))
        decoding = Decoding(
            temperature=0.0 if greedy else float(settings.get("temperature", 1.0)),
            top_k=int(settings.get("top_k", 0) or 0),
            top_p=float(settings.get("top_p", 1.0) or 1.0),
            seed=self.seed,
            when=self.when,
        )
        asked = [GenerationRequest(str(number), text, most, number) for number, text in prompts.items()]
        return {int(one.id): output.text for one, _, output in generate(self.model, asked, stops, decoding)}

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness caches requests."""
        return f"tfive-{self.name}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The tokenizer's own template, or none."""
        return str(getattr(self.model.tokenizer, "chat_template", None) or "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation in the tokenizer's template."""
        tokenizer: Any = self.model.tokenizer
        return str(
            tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
