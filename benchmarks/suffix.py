"""`make bench-suffix`: what the suffix drafter's index costs a token, in time and memory, and what it finds.

Texts are the Python standard library's own source, cut into outputs: real text, on every machine. They are
replayed as if a model wrote them: a draft is right as far as it is what the text goes on with.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.pictures import Panel, draw_panels
from benchmarks.results import RESULTS, Bar, begin, median_of
from draft_service.lookup import LookupIndex
from draft_service.ngram_index import NgramIndex, NgramOptions
from draft_service.suffix_index import OutputMemory, SuffixIndex, SuffixOptions
from specdecode.config import DEFAULT_MODEL, DraftSettings
from specdecode.models import resolve
from specdecode.tokenizer import load_tokenizer

CAPACITY = 1_000_000
OUTPUT_TOKENS = 400
PROMPT_TOKENS = 64
NUM_DRAFT_TOKENS = 8
NUM_REPLAYED = 60
NUM_REPEATS = 5
NAMESPACE = (b"", "")


def outputs(num_tokens: int) -> list[list[int]]:
    """At least `num_tokens` tokens of source, in pieces of `OUTPUT_TOKENS`, in a random order."""
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL))
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py"))
    random.Random(0).shuffle(paths)
    pieces: list[list[int]] = []
    count = 0
    for path in paths:
        if "site-packages" in path.parts:
            continue
        ids = tokenizer.backend_tokenizer.encode(path.read_text(errors="replace")).ids
        cut = [ids[at : at + OUTPUT_TOKENS] for at in range(0, len(ids) - OUTPUT_TOKENS, OUTPUT_TOKENS)]
        pieces += cut
        count += sum(map(len, cut))
        if count >= num_tokens:
            break
    random.Random(1).shuffle(pieces)
    return pieces


@dataclass
class Replay:
    """What came of one drafter on all texts, once.

    Attributes:
        index_seconds: CPU time of taking in tokens.
        propose_seconds: CPU time of look-ups.
        num_asked: tokens asked for.
    """

    index_seconds: float = 0.0
    propose_seconds: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    per_round: list[float] = field(default_factory=list)

    @property
    def microseconds(self) -> float:
        """Of building and querying, a token of text."""
        return 1e6 * (self.index_seconds + self.propose_seconds) / self.num_tokens

    def run(self, index: LookupIndex, text: Sequence[int]) -> None:
        """Replays one text."""
        index.extend(text[:PROMPT_TOKENS])
        self._catch_up(index)
        rounds, at = 0, PROMPT_TOKENS
        while at < len(text):
            began = time.thread_time()
            draft = index.propose(NUM_DRAFT_TOKENS)
            self.propose_seconds += time.thread_time() - began
            accepted = 0
            for drafted, token in zip(draft, text[at:], strict=False):
                if drafted != token:
                    break
                accepted += 1
            index.extend(text[at : at + accepted + 1])
            self._catch_up(index)
            at += accepted + 1
            rounds += 1
            self.num_drafted += len(draft)
            self.num_accepted += accepted
        self.num_rounds += rounds
        self.num_tokens += len(text)
        self.per_round.append((len(text) - PROMPT_TOKENS) / rounds)

    def _catch_up(self, index: LookupIndex) -> None:
        began = time.thread_time()
        index.catch_up(len(index.tokens))
        self.index_seconds += time.thread_time() - began

    def to_json(self) -> dict[str, float]:
        """All raw figures."""
        return {
            "microseconds_per_token": self.microseconds,
            "index_seconds": self.index_seconds,
            "propose_seconds": self.propose_seconds,
            "tokens": self.num_tokens,
            "rounds": self.num_rounds,
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "emitted_per_round": (self.num_accepted + self.num_rounds) / self.num_rounds,
        }


class Measurement:
    """All drafters on the same texts, again and again.

    Attributes:
        runs: raw figures.
        filling: µs of CPU a token that was remembered.
        took: µs of CPU a token of text, by drafter.
        emitted: of each text in a round, by drafter.
        bytes_per_token: of the memory.
    """

    def __init__(self) -> None:
        settings = DraftSettings()
        self._ngram = NgramOptions(settings.ngram_min, settings.ngram_max, trust=settings.ngram_trust)
        self._suffix = SuffixOptions(trust=settings.ngram_trust)
        pieces = outputs(CAPACITY + NUM_REPLAYED * OUTPUT_TOKENS)
        self._replayed, self._texts = pieces[:NUM_REPLAYED], pieces[NUM_REPLAYED:]
        self.runs: list[dict[str, Any]] = []
        self.filling: list[float] = []
        self.took: dict[str, list[float]] = {}
        self.emitted: dict[str, list[float]] = {}
        self.bytes_per_token = 0.0

    def run(self) -> None:
        """Once."""
        memory = OutputMemory(CAPACITY)
        began = time.thread_time()
        for text in self._texts:
            memory.remember(NAMESPACE, text)
        self.filling.append(1e6 * (time.thread_time() - began) / sum(map(len, self._texts)))
        self.bytes_per_token = memory.num_bytes / sum(len(chains.tokens) for chains in memory.of(NAMESPACE))
        self._replay("ngram", lambda: NgramIndex(self._ngram))
        self._replay("suffix, own text", lambda: SuffixIndex(self._suffix, OutputMemory(0), NAMESPACE))
        self._replay("suffix", lambda: SuffixIndex(self._suffix, memory, NAMESPACE))

    def _replay(self, name: str, make: Callable[[], LookupIndex]) -> None:
        replay = Replay()
        for text in self._replayed:
            replay.run(make(), text)
        self.took.setdefault(name, []).append(replay.microseconds)
        self.emitted[name] = replay.per_round
        self.runs.append({"drafter": name, "filling_microseconds": self.filling[-1], **replay.to_json()})


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suffix", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="directory to write to (default: docs/results)"
    )
    o = parser.parse_args(argv)
    setup = {"capacity": CAPACITY, "replayed": NUM_REPLAYED, "γ": NUM_DRAFT_TOKENS, "repeats": NUM_REPEATS}
    session = begin("suffix", setup)
    found = Measurement()
    for _ in track(range(NUM_REPEATS), "replaying"):
        found.run()
    took = {name: median_of(values) for name, values in found.took.items()}
    emitted = {name: median_of(values) for name, values in found.emitted.items()}
    filling = median_of(found.filling)
    microseconds = took["suffix"].value + filling.value
    bars = [
        Bar("suffix: building, querying and remembering, µs a token", microseconds, 20.0, "at_most"),
        Bar("suffix: MB for a million remembered tokens", found.bytes_per_token, 64.0, "at_most"),
    ]

    def draw(path: Path) -> None:
        panels = [
            [Panel("µs of CPU a token", {"": took})],
            [Panel("emitted in a round, median of the texts", {"": emitted})],
        ]
        draw_panels(path, "Look-ups in the text and in a million tokens", panels, "", "", "{:.2f}")

    summary = {
        "microseconds": {name: median.to_json() for name, median in took.items()},
        "filling_microseconds": filling.to_json(),
        "emitted_per_round": {name: median.to_json() for name, median in emitted.items()},
        "bytes_per_token": found.bytes_per_token,
    }
    path = session.write(o.results, found.runs, summary, bars, draw)
    for run in found.runs[-len(took) :]:
        each, emits = run["microseconds_per_token"], run["emitted_per_round"]
        print(f"{run['drafter']:16} {each:5.1f} µs a token, {emits:.3f} emitted in a round")
    print(f"{microseconds:.1f} µs and {found.bytes_per_token:.1f} bytes a token; {path}")


if __name__ == "__main__":
    main()
