"""`make bench-bf16_identity`: how often greedy tokens in bfloat16 depend on the shape of the forward.

Texts are equal whatever is drafted only in float32: in bfloat16 the shape of a batch changes the last bits,
and where the best two tokens (almost) tie, another one wins. The reference is each prompt alone, one token a
step. It is then run again in windows of γ + 1 tokens whose drafts are the reference's own next tokens, alone
and in a batch. A *flip* is a token unlike the reference's after the same tokens; the run goes on from
the reference's token. γ 0 alone repeats the reference and must not flip: it shows that nothing else differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.in_process import add_model_options, build_engine, lease_frame, open_order
from benchmarks.pictures import Panel, draw_panels
from benchmarks.prompts import PromptKind, prompts_of
from benchmarks.results import QUICK_RESULTS, RESULTS, Bar, Estimate, begin, rate_of
from benchmarks.schedule import Display, Step
from specdecode import models, tokenizer
from specdecode.errors import SpecdecodeError
from specdecode.types import DecodeFrame, Lease, SamplingParams, StepResult, Verify
from target_service.engine import Engine
from target_service.sequence import SequenceKey

NUM_TOP = 2
MAX_FLIP_MARGIN = 1.0
"""Nats between the reference's best two tokens: a flip beyond is no matter of last bits. Logits of 16 to 32
have steps of 1/8 in bfloat16, and rounding adds up over the layers to a few of them.
"""


@dataclass(frozen=True)
class Options:
    """What to measure."""

    num_prompts: int
    """Of each kind."""
    max_tokens: int
    num_draft_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    model: str
    device: str
    dtype: str
    threads: int


@dataclass(frozen=True)
class Reference:
    """A prompt's greedy text, alone, one token a step.

    Attributes:
        margins: difference of the best two tokens' logprobs at each position, in nats; 0 is an exact tie.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Flip:
    """A token that differs from the reference."""

    prompt: int
    position: int
    reference: int
    token: int
    margin: float


@dataclass(frozen=True)
class Piece(Step):
    """One part of the plan: the reference of some prompts, or their run in windows of γ + 1 (γ not None)."""

    prompts: range
    batch: int
    num_draft_tokens: int | None = None


def plan(options: Options) -> list[Piece]:
    """References first."""
    count = options.num_prompts * len(PromptKind)
    pieces = []
    for index in range(count):
        guess = options.max_tokens * 0.035
        pieces.append(Piece("reference", "reference", guess, range(index, index + 1), 1))
    for batch in options.batches:
        for gamma in options.num_draft_tokens:
            what = f"γ {gamma}, {batch} at once"
            # Two cores: a step costs 35 ms and 1.2 ms a token in flight.
            guess = options.max_tokens / (gamma + 1) * (0.035 + 0.0012 * batch * (gamma + 1))
            for start in range(0, count, batch):
                prompts = range(start, min(start + batch, count))
                pieces.append(Piece(what, what, guess, prompts, batch, gamma))
    return pieces


def reference_of(
    engine: Engine, prompt: tuple[int, ...], max_tokens: int, eos_token_ids: tuple[int, ...], salt: bytes
) -> Reference:
    """Runs a prompt alone, up to its end."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, stop_token_ids=eos_token_ids, logprobs=NUM_TOP
    )
    engine.apply(0, lease_frame([open_order(0, prompt, sampling, salt)], max_tokens))
    token_ids: list[int] = []
    margins: list[float] = []
    while engine.sequences:
        for _, result in engine.step().results:
            _raise_error(result)
            token_ids += result.token_ids
            margins += (token.top[0][1] - token.top[1][1] for token in result.logprobs)
    return Reference(prompt, tuple(token_ids), tuple(margins))


class Replay:
    """Runs references again, all at once, in windows of γ + 1 tokens.

    Args:
        references: by the number of their prompt.
        salt: keeps the prefix cache from knowing KV of other replays.
    """

    def __init__(
        self, engine: Engine, references: dict[int, Reference], num_draft_tokens: int, salt: str
    ) -> None:
        self._engine = engine
        self._references = references
        self._num_draft_tokens = num_draft_tokens
        self._salt = salt
        self._flips: list[Flip] = []
        self._done = dict.fromkeys(references, 0)
        """Tokens of each text that have been compared."""

    def run(self) -> list[Flip]:
        """Up to the end of every text."""
        for number in self._references:
            self._open(number)
        while self._engine.sequences:
            self._round()
        return self._flips

    def _open(self, number: int) -> None:
        reference, done = self._references[number], self._done[number]
        sampling = SamplingParams(temperature=0.0, max_tokens=len(reference.token_ids))
        tokens = reference.prompt + reference.token_ids[:done]
        order = open_order(number, tokens, sampling, f"{self._salt}/{number}".encode(), num_output=done)
        self._engine.apply(0, DecodeFrame(opens=(order,)))

    def _round(self) -> None:
        """One window of every sequence that has not ended."""
        waiting = {key.sequence for key in self._engine.sequences}
        orders = [self._order(number) for number in sorted(waiting)]
        verifies = tuple(order for order in orders if isinstance(order, Verify))
        leases = tuple(order for order in orders if isinstance(order, Lease))
        self._engine.apply(0, DecodeFrame(verifies=verifies, leases=leases))
        while waiting:
            for key, result in self._engine.step().results:
                _raise_error(result)
                waiting.discard(key.sequence)
                self._compare(key, result)

    def _order(self, number: int) -> Verify | Lease:
        reference, done = self._references[number], self._done[number]
        length = len(reference.prompt) + done
        if self._num_draft_tokens == 0:
            return Lease(number, length, 1)
        return Verify(number, length, reference.token_ids[done : done + self._num_draft_tokens])

    def _compare(self, key: SequenceKey, result: StepResult) -> None:
        """Only a window's last token can differ: those before it are accepted drafts, the reference's own."""
        number, reference = key.sequence, self._references[key.sequence]
        self._done[number] += len(result.token_ids)
        position = self._done[number] - 1
        expected, token = reference.token_ids[position], result.token_ids[-1]
        if token == expected:
            return
        self._flips.append(Flip(number, position, expected, token, reference.margins[position]))
        if not result.ended:
            self._engine.close(key)
            self._open(number)


def _raise_error(result: StepResult) -> None:
    if result.error is not None:
        raise result.error


Condition = tuple[int, int]
"""Batch, γ."""


@dataclass(frozen=True)
class Findings:
    """What the plan gave."""

    references: dict[int, Reference]
    flips: dict[Condition, list[Flip]]

    @property
    def num_tokens(self) -> int:
        """Compared under each condition."""
        return sum(len(reference.token_ids) for reference in self.references.values())

    def flip_rate(self, condition: Condition) -> Estimate:
        """Flips per 1,000 tokens."""
        return rate_of(len(self.flips[condition]), self.num_tokens, per=1000)

    def tie_rate(self) -> Estimate:
        """Exact ties of the reference's best two tokens per 1,000 tokens."""
        ties = sum(margin == 0.0 for r in self.references.values() for margin in r.margins)
        return rate_of(ties, self.num_tokens, per=1000)

    def runs(self) -> list[dict[str, Any]]:
        """One entry a condition, with every flip."""
        return [
            {
                "batch": batch,
                "num_draft_tokens": gamma,
                "num_tokens": self.num_tokens,
                "flips": [asdict(flip) for flip in flips],
            }
            for (batch, gamma), flips in self.flips.items()
        ]

    def summary(self) -> dict[str, Any]:
        """Rates per 1,000 tokens."""
        return {
            "num_tokens": self.num_tokens,
            "exact_ties_per_1000": self.tie_rate().to_json(),
            "flips_per_1000": {
                f"γ {gamma}, {batch} at once": self.flip_rate((batch, gamma)).to_json()
                for batch, gamma in self.flips
            },
        }

    def bars(self) -> list[Bar]:
        """The control, and that flips happen at near-ties only."""
        margins = [flip.margin for flips in self.flips.values() for flip in flips]
        name = "largest difference of the best two logprobs at a flip"
        bars = [Bar(name, max(margins, default=0.0), MAX_FLIP_MARGIN, "at_most")]
        if (1, 0) in self.flips:
            bars.append(Bar("flips of γ 0 alone, the control", len(self.flips[1, 0]), 0.0, "at_most"))
        return bars

    def panel(self) -> Panel:
        """γ by γ; beside them how often the reference ties."""
        groups: dict[str, dict[str, Estimate]] = {f"γ {gamma}": {} for _, gamma in self.flips}
        for batch, gamma in self.flips:
            name = "flips, alone" if batch == 1 else f"flips, {batch} at once"
            groups[f"γ {gamma}"][name] = self.flip_rate((batch, gamma))
        return Panel("", {**groups, "ties": {"exact ties of the best two": self.tie_rate()}})


def measure(engine: Engine, options: Options, display: Display[Piece]) -> Findings:
    """Runs the plan."""
    path = models.resolve(options.model)
    tokens = tokenizer.load_tokenizer(path)
    eos_token_ids = tokenizer.eos_token_ids(path, tokens)
    texts = [prompt.text for kind in PromptKind for prompt in prompts_of(kind, options.num_prompts)]
    prompts = [_chat_ids(tokens, text) for text in texts]
    found = Findings({}, {})
    for piece in display.follow(plan(options)):
        if piece.num_draft_tokens is None:
            for number in piece.prompts:
                salt = f"reference/{number}".encode()
                found.references[number] = reference_of(
                    engine, prompts[number], options.max_tokens, eos_token_ids, salt
                )
        else:
            references = {number: found.references[number] for number in piece.prompts}
            flips = Replay(engine, references, piece.num_draft_tokens, piece.what).run()
            found.flips.setdefault((piece.batch, piece.num_draft_tokens), []).extend(flips)
    return found


def _chat_ids(tokens: tokenizer.PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    message = [{"role": "user", "content": text}]
    encoded = tokens.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
    return tuple(encoded["input_ids"])


def parse_options(argv: Sequence[str] | None = None) -> tuple[Options, Path]:
    """What to measure, and where to write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bf16_identity", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--num-prompts", type=int, default=16, help="of each kind (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each text (default: 96)")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[0, 1, 3, 8], metavar="γ")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2 prompts of each kind, 24 tokens, written to build/results: proves that it works",
    )
    parser.add_argument("--results", type=Path, help="directory to write to (default: docs/results)")
    o = parser.parse_args(argv)
    if o.quick:
        o.num_prompts, o.max_tokens = 2, 24
    options = Options(
        num_prompts=o.num_prompts,
        max_tokens=o.max_tokens,
        num_draft_tokens=tuple(o.num_draft_tokens),
        batches=tuple(o.batches),
        model=o.model,
        device=o.device,
        dtype=o.dtype,
        threads=o.threads,
    )
    return options, o.results or (QUICK_RESULTS if o.quick else RESULTS)


def main() -> int:
    """Measures and writes; the exit code."""
    options, directory = parse_options()
    session = begin("bf16_identity", asdict(options))
    with Display[Piece](time.monotonic) as display:
        try:
            display.say("Loading the model")
            engine = build_engine(options.model, options.device, options.dtype, options.threads)
            found = measure(engine, options, display)
        except SpecdecodeError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    path = session.write(
        directory,
        found.runs(),
        found.summary(),
        found.bars(),
        lambda png: draw_panels(
            png,
            f"{options.model}, {options.dtype}: greedy tokens unlike those of single steps",
            [[found.panel()]],
            y_label="per 1,000 tokens",
            x_label=f"drafts in a window; {found.num_tokens} tokens each, 95 % intervals",
            value_format="{:.1f}",
        ),
    )
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
