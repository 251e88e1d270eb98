"""What a router tells in numbers: its figures, and what is measured of requests besides.

Rounds are counted once, in `router.figures`; here they become families. Series are bounded whatever clients
say: traffic classes as the figures bound them, draft positions by the largest γ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, fields

from router.request import Request, Round
from router.request_span import total_usage
from specdecode.errors import CancelledError
from specdecode.figures import FigureLabel, Figures, speedups
from specdecode.requests import RouterStatus
from specdecode.telemetry import TraceContext
from specdecode.telemetry.metrics import (
    TOKENS,
    Distribution,
    Family,
    Histogram,
    Sample,
    counter,
    gauge,
    histogram,
)
from specdecode.types import StepResult, Usage

NOBODY = "none"
"""The drafter of rounds that asked nobody."""

Number = Callable[[Figures], float]

_COUNTERS: tuple[tuple[str, str, Number], ...] = (
    ("num_drafts", "Rounds with drafts", lambda f: f.num_speculated),
    ("num_draft_tokens", "Drafted tokens", lambda f: f.num_drafted),
    ("num_accepted_tokens", "Drafted tokens accepted; without bonus tokens", lambda f: f.num_accepted),
    (
        "num_bonus_tokens",
        "Tokens added after a draft that was accepted whole",
        lambda f: f.num_speculated - f.num_recovered - f.num_cut,
    ),
    ("num_recovered_tokens", "Tokens added where a draft was rejected", lambda f: f.num_recovered),
    ("num_emitted_tokens", "Tokens emitted", lambda f: f.num_emitted),
    ("num_rounds", "Rounds, with drafts and without", lambda f: f.num_rounds),
    ("num_fallbacks", "Rounds that wanted drafts and got none", lambda f: f.num_fallbacks),
    ("alpha_tested", "Probability that draft positions were reached, summed", lambda f: sum(f.tested)),
    (
        "alpha_passed",
        "Probability that draft positions were reached and accepted, summed",
        lambda f: sum(f.passed),
    ),
    ("timed_rounds", "Rounds that the sums of seconds are of", lambda f: f.num_timed),
    ("timed_tokens", "Tokens that the sums of seconds are of", lambda f: f.timed_emitted),
    ("timed_seconds", "Seconds from one result to the next", lambda f: f.seconds),
    ("timed_step_seconds", "Of those, seconds of the target's steps", lambda f: f.step_seconds),
    ("drafting_seconds", "Seconds that drafters computed", lambda f: f.draft_seconds),
    ("target_flops", "Operations of the target's forwards for windows", lambda f: f.target_flops),
    (
        "predicted_emitted_tokens",
        "Tokens that decisions expected",
        lambda f: f.predictions.predicted_emitted,
    ),
    (
        "emitted_of_predicted_tokens",
        "Tokens that the same rounds emitted",
        lambda f: f.predictions.emitted,
    ),
    ("predicted_seconds", "Seconds that decisions expected", lambda f: f.predictions.predicted_seconds),
    ("seconds_of_predicted", "Seconds that the same rounds took", lambda f: f.predictions.seconds),
)


class RouterMetrics:
    """Observes requests and rounds; within the event loop only."""

    def __init__(self) -> None:
        self._outcomes = Counter({"finished": 0, "cancelled": 0, "failed": 0, "refused": 0})
        self._usage = Counter({field.name: 0 for field in fields(Usage)})
        self._first_token, self._token, self._request = Histogram(), Histogram(), Histogram()
        self._round, self._queue, self._draft = Histogram(), Histogram(), Histogram()
        self._forward, self._verify = Histogram(), Histogram()
        self._emitted = Histogram(TOKENS)

    def took(self, result: StepResult, round_: Round, num_kept: int, seconds: float | None) -> None:
        """A result of which so many tokens were kept; `seconds` since the one before, None for the first."""
        times = result.times
        self._queue.observe(times.queue)
        self._forward.observe(times.forward)
        self._verify.observe(times.verify)
        if round_.drafter is not None:
            self._draft.observe(round_.draft_seconds)
        if result.num_drafted:
            self._emitted.observe(num_kept)
        if seconds is not None and num_kept:
            self._round.observe(seconds if result.num_drafted else seconds / num_kept)
            self._token.observe(seconds / num_kept)

    def said_first(self, seconds: float, context: TraceContext | None) -> None:
        """A request's first piece, so long after it came; `context` of a trace that tells of it."""
        self._first_token.observe(seconds, context)

    def ended(self, request: Request | None, seconds: float, context: TraceContext | None) -> None:
        """A request ended; None: it was refused."""
        self._outcomes[outcome(request)] += 1
        if request is None:
            return
        self._request.observe(seconds, context)
        usage = total_usage(request)
        for field, count in zip(fields(Usage), astuple(usage), strict=True):
            self._usage[field.name] += count

    def families(self, figures: Sequence[Figures], status: RouterStatus) -> list[Family]:
        """All that is told."""
        return [*figure_families(figures), *self._of_requests(status), *self._of_times()]

    def _of_requests(self, status: RouterStatus) -> list[Family]:
        usage = self._usage
        outcomes = (Sample(count, {"outcome": name}) for name, count in self._outcomes.items())
        replicas = (Sample(float(r.connected), {"replica": r.address}) for r in status.targets)
        drafts = (Sample(float(r.connected), {"replica": r.address}) for r in status.drafts)
        prices = (Sample(r.load.price, {"replica": r.address}) for r in status.targets if r.load is not None)
        return [
            counter("specdecode_requests", "Requests that ended, by outcome", *outcomes),
            gauge("specdecode_requests_running", "Requests open now", Sample(status.num_requests)),
            _count("prompt_tokens", "Prompt tokens of requests that ended", usage["num_prompt_tokens"]),
            _count("cached_prompt_tokens", "Of those, from the prefix cache", usage["num_cached_tokens"]),
            _count("failovers", "Texts that went on on another replica", usage["num_failovers"]),
            _count("preemptions", "Sequences that were computed again", usage["num_preemptions"]),
            gauge("specdecode_replica_up", "Whether a target can be used", *replicas),
            gauge("specdecode_draft_up", "Whether the draft service can be asked", *drafts),
            gauge("specdecode_replica_price", "Emitted tokens that one more in flight would cost", *prices),
        ]

    def _of_times(self) -> list[Family]:
        parts = {
            "round": self._round,
            "queue": self._queue,
            "draft": self._draft,
            "forward": self._forward,
            "verify": self._verify,
        }
        samples = (part.sample(part=name) for name, part in parts.items())
        return [
            histogram(
                "specdecode_time_to_first_token_seconds",
                "From the request to its first piece",
                self._first_token.sample(),
            ),
            histogram(
                "specdecode_inter_token_latency_seconds",
                "A token's share of the time since the result before",
                self._token.sample(),
            ),
            histogram("specdecode_request_duration_seconds", "Of requests that ran", self._request.sample()),
            histogram("specdecode_round_seconds", "Parts of a round", *samples),
            histogram(
                "specdecode_emitted_per_round", "Tokens of a round with drafts", self._emitted.sample()
            ),
        ]


def outcome(request: Request | None) -> str:
    """How a request ended, in one word."""
    if request is None:
        return "refused"
    errors = [choice.error for choice in request.choices if choice.error is not None]
    if any(not isinstance(error, CancelledError) for error in errors):
        return "failed"
    return "cancelled" if errors else "finished"


def figure_families(figures: Sequence[Figures]) -> list[Family]:
    """Families of what was counted of rounds."""
    classes = _grouped(figures, _class_labels)
    counters = [
        counter(f"specdecode_{name}", what, *(_sum(own, number, labels) for labels, own in classes))
        for name, what, number in _COUNTERS
    ]
    drafters = _grouped(figures, lambda label: {"drafter": _drafter(label)})
    return [*counters, *_by_position(drafters), _runs(figures), _reasons(figures), *_speedups(figures)]


def _class_labels(label: FigureLabel) -> dict[str, str]:
    return {
        "drafter": _drafter(label),
        "temperature": label.temperature,
        "traffic_class": label.traffic_class,
    }


def _drafter(label: FigureLabel) -> str:
    return NOBODY if label.drafter is None else label.drafter.value


Grouped = list[tuple[Mapping[str, str], list[Figures]]]


def _grouped(figures: Iterable[Figures], labels: Callable[[FigureLabel], dict[str, str]]) -> Grouped:
    groups: dict[tuple[tuple[str, str], ...], list[Figures]] = defaultdict(list)
    for entry in figures:
        groups[tuple(labels(entry.label).items())].append(entry)
    return [(dict(key), own) for key, own in groups.items()]


def _sum(figures: Iterable[Figures], number: Number, labels: Mapping[str, str]) -> Sample:
    return Sample(sum(map(number, figures)), labels)


def _by_position(drafters: Grouped) -> list[Family]:
    columns: tuple[tuple[str, str, Callable[[Figures], Sequence[float]]], ...] = (
        ("num_draft_tokens_per_pos", "Drafted tokens by position", lambda f: f.drafted_by_position),
        ("num_accepted_tokens_per_pos", "Accepted tokens by position", lambda f: f.accepted_by_position),
        ("alpha_tested_per_pos", "As alpha_tested, by position", lambda f: f.tested),
        ("alpha_passed_per_pos", "As alpha_passed, by position", lambda f: f.passed),
    )
    return [
        counter(f"specdecode_{name}", what, *_positions(drafters, values)) for name, what, values in columns
    ]


def _positions(drafters: Grouped, values: Callable[[Figures], Sequence[float]]) -> Iterable[Sample]:
    for labels, own in drafters:
        sums: dict[int, float] = defaultdict(float)
        for entry in own:
            for position, value in enumerate(values(entry)):
                sums[position] += value
        for position, value in sums.items():
            yield Sample(value, {**labels, "position": str(position)})


def _runs(figures: Sequence[Figures]) -> Family:
    """By γ, how many drafts were accepted."""
    sums: dict[int, list[int]] = {}
    for entry in figures:
        for length, counts in enumerate(entry.runs):
            own = sums.setdefault(length, [0] * (length + 1))
            for accepted, rounds in enumerate(counts):
                own[accepted] += rounds
    samples = (
        Sample(
            Distribution([float(a) for a in range(length)], own, sum(a * n for a, n in enumerate(own))),
            {"num_draft_tokens": str(length)},
        )
        for length, own in sums.items()
        if length and any(own)
    )
    return histogram("specdecode_accepted_run_length", "Accepted tokens of rounds, by γ", *samples)


def _reasons(figures: Sequence[Figures]) -> Family:
    counts: Counter[str] = Counter()
    for entry in figures:
        counts.update(dict(entry.reasons))
    samples = (Sample(count, {"reason": reason}) for reason, count in counts.items())
    return counter("specdecode_rounds_by_reason", "Rounds by what decided γ", *samples)


def _speedups(figures: Sequence[Figures]) -> list[Family]:
    """Since the start, of the label with most drafted rounds for each drafter."""
    best: dict[str, tuple[int, float, float | None]] = {}
    for entry, found in zip(figures, speedups(figures), strict=True):
        name = _drafter(entry.label)
        if found is not None and entry.num_speculated > best.get(name, (0,))[0]:
            best[name] = entry.num_speculated, found.theoretical, found.observed
    theory = (Sample(each[1], {"drafter": name}) for name, each in best.items())
    real = (Sample(each[2], {"drafter": name}) for name, each in best.items() if each[2] is not None)
    about = "since the start, where a drafter drafted most"
    return [
        gauge("specdecode_speedup_theoretical", f"By Leviathan's formula {about}", *theory),
        gauge("specdecode_speedup_observed", f"Of drafted rounds over others {about}", *real),
    ]


def _count(name: str, what: str, value: int) -> Family:
    return counter(f"specdecode_{name}", what, Sample(value))
