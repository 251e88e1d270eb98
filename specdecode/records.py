"""Records of requests, one JSON object a line: a router writes them if it is told to, `specdecode stats` and
`specdecode audit` read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specdecode.errors import InvalidArgumentError
from specdecode.types import Method, SamplingParams


@dataclass(frozen=True)
class TimedRounds:
    """Rounds of one kind, and where their time went; sums, all but those that took in a prompt.

    Attributes:
        seconds: from one result to the next.
        draft: what drafters computed.
        queue: orders waited for a step.
        forward: of the target's steps, as `verify`.
        step: whole steps.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    draft: float = 0.0
    queue: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    step: float = 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """Of what was emitted; None where nothing was."""
        return self.seconds / self.num_tokens if self.num_tokens else None

    @property
    def rest(self) -> float:
        """What none of the parts has: the way there and back."""
        return max(self.seconds - self.draft - self.queue - self.step, 0.0)

    def __add__(self, other: TimedRounds) -> TimedRounds:
        return TimedRounds(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(TimedRounds)))


@dataclass(frozen=True)
class RecordedChoice:
    """What an audit needs of a choice."""

    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True)
class RecordedTokens:
    """A request as it was run, by token ids; only where the operator asks for it.

    Attributes:
        seed: that the choices were drawn with; 0 unless the method is coupled.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    choices: tuple[RecordedChoice, ...]


@dataclass(frozen=True)
class RequestRecord:
    """One request.

    Attributes:
        id: as its pieces have it.
        trace_id: hexadecimal; "" where nothing is traced.
        ended_at: seconds since the epoch.
        model, draft_model: that were served; "" for no draft model.
        drafters: that were asked.
        outcome: finished, cancelled or failed; `error` says why it failed.
        runs: [γ][a] rounds that drafted γ tokens of which a were accepted.
        tested, passed: by draft position, as in `specdecode.figures.Figures`; α is passed / tested.
        reasons: rounds by what decided γ.
        num_fallbacks: rounds that wanted drafts and got none.
        speedup_observed: seconds per token of its rounds without drafts over those with; None without both.
        speedup_theoretical: by Leviathan's formula for its α, γ and c; None without drafts.
        seconds: from its start to its end.
        first_token_seconds: to its first piece.
        drafted, plain: its rounds with drafts asked for, and without.
        tokens: None unless the operator asks for token ids.
    """

    id: str
    trace_id: str
    ended_at: float
    model: str
    draft_model: str
    method: str
    temperature: float
    traffic_class: str
    mode: str
    tier: str
    outcome: str
    error: str | None
    drafters: tuple[str, ...] = ()
    num_choices: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_emitted: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_bonus: int = 0
    num_recovered: int = 0
    num_failovers: int = 0
    num_preemptions: int = 0
    num_fallbacks: int = 0
    fallback_triggered: bool = False
    acceptance: float | None = None
    alphas: tuple[float, ...] = ()
    tested: tuple[float, ...] = ()
    passed: tuple[float, ...] = ()
    runs: tuple[tuple[int, ...], ...] = ()
    reasons: Mapping[str, int] = field(default_factory=dict)
    speedup_observed: float | None = None
    speedup_theoretical: float | None = None
    seconds: float = 0.0
    first_token_seconds: float | None = None
    drafted: TimedRounds = TimedRounds()
    plain: TimedRounds = TimedRounds()
    tokens: RecordedTokens | None = None

    def to_line(self) -> str:
        """JSON on one line."""
        content = {name: value for name, value in asdict(self).items() if name != "tokens" or value}
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def read_records(paths: Sequence[Path]) -> Iterator[RequestRecord]:
    """The records of files, in order.

    Raises:
        InvalidArgumentError: a file can't be read, or a line of it is no record; it names both.
    """
    for path in paths:
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _record(line, f"{path}:{number}")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError.of("FILE", f"{path} can't be read: {error}") from None


def _record(line: str, where: str) -> RequestRecord:
    try:
        content = json.loads(line)
        content["drafted"] = TimedRounds(**content["drafted"])
        content["plain"] = TimedRounds(**content["plain"])
        for name in ("drafters", "alphas", "tested", "passed"):
            content[name] = tuple(content[name])
        content["runs"] = tuple(map(tuple, content["runs"]))
        content["tokens"] = _tokens(content["tokens"]) if content.get("tokens") else None
        Method(content["method"])
        return RequestRecord(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidArgumentError.of("FILE", f"{where} is no record of a request: {error}") from None


def _tokens(content: dict[str, Any]) -> RecordedTokens:
    sampling = {name: _frozen(value) for name, value in content["sampling"].items()}
    return RecordedTokens(
        prompt=tuple(content["prompt"]),
        sampling=SamplingParams(**sampling),
        seed=content["seed"],
        choices=tuple(RecordedChoice(tuple(c["token_ids"]), c["finish_reason"]) for c in content["choices"]),
    )


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
