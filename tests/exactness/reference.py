"""What transformers says a text must be, position by position, and by how much.

Batches of other shapes change the last bits of logits, so that a near tie may go either way. A difference is
excused only where the reference's own margin is below `EXCUSED_MARGIN`; what follows it is then judged by the
reference on the text as it was served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdecode.sampling import Window, exponential_noise, probabilities
from specdecode.types import SamplingParams

EXCUSED_MARGIN = 1e-3
EXCUSED_SHARE = 1e-3

Tokens = tuple[int, ...]
Chosen = tuple[list[int], list[float]]
"""The right token of each row, and how far it is ahead of the next best."""
Choose = Callable[[Tensor, Tokens, Tokens], Chosen]
"""(logits [N, V], prompt, text of N tokens) → chosen."""


@dataclass(frozen=True)
class Difference:
    """A token that is not the reference's."""

    run: str
    position: int
    served: int
    expected: int
    margin: float

    def __str__(self) -> str:
        return (
            f"{self.run}, token {self.position}: {self.served} for {self.expected}, margin {self.margin:.2e}"
        )


class Reference:
    """The plain model, float32, unbatched."""

    def __init__(self, path: Path, eos_token_ids: Sequence[int]) -> None:
        self._module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._eos = list(eos_token_ids)

    @torch.inference_mode()
    def generate(self, prompt: Tokens, max_tokens: int) -> Chosen:
        """Greedy text by transformers' own generate, and the margin of each of its tokens in logits."""
        ids = torch.tensor([prompt])
        output = self._module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self._eos,
            pad_token_id=self._eos[0],
            return_dict_in_generate=True,
            output_logits=True,
        )
        text = output.sequences[0, len(prompt) :].tolist()
        best = torch.cat(output.logits).topk(2).values
        return text, (best[:, 0] - best[:, 1]).tolist()

    @torch.inference_mode()
    def rows(self, prompt: Tokens, text: Tokens) -> Tensor:
        """[len(text), V] logits after each of the text's prefixes, in one forward."""
        ids = torch.tensor([[*prompt, *text[:-1]]])
        logits: Tensor = self._module(ids, use_cache=False, logits_to_keep=len(text)).logits[0]
        return logits

    def judge(self, prompt: Tokens, text: Tokens, choose: Choose) -> Chosen:
        """The right token at every position of a served text, after the tokens before it."""
        return choose(self.rows(prompt, text), prompt, text)

    def differences_from(
        self, run: str, prompt: Tokens, text: Tokens, reference: Chosen, choose: Choose
    ) -> list[Difference]:
        """Tokens of a served text that are not the reference's, whose own text is known."""
        expected, margins = reference
        if list(text) == expected:
            return []
        shorter = min(len(text), len(expected))
        index = next((i for i in range(shorter) if text[i] != expected[i]), None)
        assert index is not None, f"{run}: {len(text)} tokens for {len(expected)}, which begin alike"
        first = Difference(run, index, text[index], expected[index], margins[index])
        later = differences_of(run, text, self.judge(prompt, text, choose))
        return [first, *(difference for difference in later if difference.position > index)]


def differences_of(run: str, text: Tokens, judged: Chosen) -> list[Difference]:
    """Tokens of a text that are not the right ones."""
    rows = zip(text, *judged, strict=True)
    return [
        Difference(run, index, served, right, margin)
        for index, (served, right, margin) in enumerate(rows)
        if served != right
    ]


def greedy(logits: Tensor, prompt: Tokens, text: Tokens) -> Chosen:
    """The best token; margins are differences of logits."""
    best = logits.topk(2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def coupled(sampling: SamplingParams, seed: int, choice_index: int) -> Choose:
    """The token of least e/p; margins are differences of its logarithm."""

    def choose(logits: Tensor, prompt: Tokens, text: Tokens) -> Chosen:
        history = [*prompt, *text[:-1]]
        window = Window(sampling, list(prompt), len(prompt), tuple(text[:-1]))
        p = probabilities(logits, [window]).double()
        positions = torch.arange(len(prompt), len(history) + 1)[:, None]
        noise = exponential_noise(seed, choice_index, positions, torch.arange(p.shape[1]))
        scores = (noise / p).log()  # infinite outside the support
        best = scores.topk(2, largest=False)
        return best.indices[:, 0].tolist(), (best.values[:, 1] - best.values[:, 0]).tolist()

    return choose


def assert_excused(differences: Sequence[Difference], num_tokens: int) -> None:
    """All differences are near ties, and few."""
    for difference in differences:
        print(difference)
    wrong = [str(difference) for difference in differences if not difference.margin < EXCUSED_MARGIN]
    assert not wrong, "\n".join(wrong)
    assert len(differences) <= EXCUSED_SHARE * num_tokens, (
        f"{len(differences)} near ties in {num_tokens} tokens"
    )
