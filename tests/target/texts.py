"""A prompt and what the tiny Llama says after it."""

from __future__ import annotations

from specdecode.types import Lease
from tests.lm.tiny import VOCAB_SIZE, random_prompt
from tests.target.driver import opening
from tests.target.reference import continuation

PROMPT = random_prompt(21, seed=4)
GREEDY_TEXT = continuation("llama", opening(0, PROMPT, max_tokens=40))
OTHER_PROMPT = PROMPT[:9]
OTHER_TEXT = continuation("llama", opening(0, OTHER_PROMPT, max_tokens=40))
WRONG = next(token for token in range(VOCAB_SIZE) if token not in [*PROMPT, *GREEDY_TEXT, *OTHER_TEXT])
"""An id that occurs nowhere."""


def prompt_lease(num_tokens: int, sequence: int = 0) -> Lease:
    """A lease for what comes after PROMPT."""
    return Lease(sequence, len(PROMPT), num_tokens)
