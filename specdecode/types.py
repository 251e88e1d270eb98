"""The nouns that services exchange, as frozen dataclasses; `specdecode.wire` is where they meet protobuf.

Words (the field's): p is the target's and q the draft's distribution at one position after all sampling
transforms; a round is one draft of γ tokens (maybe none) and one verification; every verification adds one
token of the target's own: the bonus after γ accepted drafts, else the one recovered from the residual. Token
ids are ints; probabilities are floats; times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from specdecode.cost_tables import StepCosts
from specdecode.errors import SpecdecodeError

MAX_DRAFT_TOKENS = 32
"""Largest γ of one round."""


class Method(Enum):
    """Lossless verification methods."""

    GREEDY = "greedy"
    REJECTION = "rejection"
    BLOCK = "block"
    COUPLED = "coupled"


class Origin(Enum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    BONUS = "bonus"
    RECOVERED = "recovered"
    PLAIN = "plain"
    """A round without drafts, or a leased token."""


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""
    LENGTH = "length"


class DrafterKind(Enum):
    """Who proposes."""

    NGRAM = "ngram"
    MODEL = "model"
    SUFFIX = "suffix"

    @property
    def looks_up(self) -> bool:
        """Whether it proposes what was said before, without a model."""
        return self is not DrafterKind.MODEL


@dataclass(frozen=True)
class SamplingParams:
    """What turns logits into p, and when a sequence ends; the same object on the target's and the draft's
    side.

    Transforms apply in the order of the fields up to `min_p` (see `specdecode.sampling`). `temperature` 0 is
    greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off; `repetition_penalty` 1 and the other penalties 0 are
    off. `logprobs` is the number of top alternatives reported beside each emitted token, None for no logprobs
    at all.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """All ids that end the sequence: end-of-sequence ids of the model (unless ignored) and the request's
    own.
    """
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the history."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class SparseDistributions:
    """q at each drafted position, restricted to its support, in drafting order.

    Attributes:
        sizes: [γ] int32, size of each position's support.
        token_ids: [Σ sizes] int32, support ids of all positions one after another.
        probs: [Σ sizes] float32, their probabilities: exactly what was sampled from.
    """

    sizes: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class OpenSequence:
    """Start (or, with output so far in `token_ids`, continue) a sequence on a replica.

    `token_ids` are the committed tokens: prompt, then output. Nothing is emitted for an Open alone: KV of all
    but the last token is computed, and a Verify or Lease (in the same frame or later) runs the last one.
    """

    sequence: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    method: Method
    seed: int = 0
    choice_index: int = 0
    deadline: float | None = None
    """Seconds since the epoch."""
    cache_salt: bytes = b""
    traceparent: str = ""
    trust_draft: bool = True
    """Whether q may be believed; otherwise drafts are verified as one-hot (exact against any drafter)."""


@dataclass(frozen=True)
class Verify:
    """One round with drafts. `q` is None for greedy, coupled and one-hot drafts."""

    sequence: int
    committed_length: int
    drafted: tuple[int, ...]
    q: SparseDistributions | None = None
    span_id: int = 0
    """Of the round's span, in the trace of the sequence's Open; 0: it has none."""


@dataclass(frozen=True)
class Lease:
    """Permission to emit up to `num_tokens` more tokens without drafts, one a step."""

    sequence: int
    committed_length: int
    num_tokens: int
    span_id: int = 0
    """As `Verify.span_id`; a lease that is renewed keeps its own."""


@dataclass(frozen=True)
class DecodeFrame:
    """What a router sends a target in one message; applied in the order opens, verifies, leases, closes."""

    opens: tuple[OpenSequence, ...] = ()
    verifies: tuple[Verify, ...] = ()
    leases: tuple[Lease, ...] = ()
    closes: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.opens or self.verifies or self.leases or self.closes)


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of one emitted token from the target's raw logits (before any transform)."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable (token id, logprob), best first."""


@dataclass(frozen=True)
class StepTimes:
    """Parts of one step, seconds."""

    queue: float = 0.0
    """From this sequence's order being there to the step's start."""
    forward: float = 0.0
    verify: float = 0.0
    """Transforms, verification and sampling."""
    step: float = 0.0
    """The whole step."""


@dataclass(frozen=True)
class StepResult:
    """What one step did for one sequence.

    `tested[i]` is the probability (a count under greedy and coupled) that draft position i was reached,
    `passed[i]` that it was reached and accepted, given the drafted prefix; α_i is estimated by Σ passed[i] /
    Σ tested[i].
    """

    sequence: int
    committed_length: int
    """After this step: prompt + output."""
    token_ids: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    tested: tuple[float, ...] = ()
    passed: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    lease_left: int = 0
    """Tokens this sequence may still emit without asking; 0 means it waits for the router."""
    times: StepTimes = StepTimes()
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache, reported with the first result."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: SpecdecodeError | None = None

    @property
    def ended(self) -> bool:
        """Whether the replica has forgotten the sequence."""
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True)
class LoadSnapshot:
    """One replica's load at the end of one step; what all its sequences decide on."""

    num_running: int = 0
    num_waiting: int = 0
    tokens_in_flight: int = 0
    """Query tokens in the step's forward: Σ (γ_i + 1) plus prefill chunks."""
    num_rows: int = 0
    """Rows that needed logits."""
    num_cached_tokens: int = 0
    """KV tokens the step's sequences attended to."""
    num_free_blocks: int = 0
    num_blocks: int = 0
    step_seconds: float = 0.0
    num_ordered: int = 0
    """Running sequences that the next step carries without another order (a lease, drafts to verify)."""
    num_ordered_tokens: int = 0
    """Query tokens of those."""
    num_prefill_tokens: int = 0
    """Prompt tokens that the next step computes."""
    expected_emitted: float = 0.0
    """Emitted tokens of the next step by what is ordered."""
    price: float = 0.0
    """λ: emitted tokens that one more token in flight would cost."""
    idle_share: float = 1.0
    """φ: share of the time that routers were waited for in which nothing ran, in [0, 1]."""
    cost_ratio: float = 1.0
    """What steps take of what the calibrated costs say."""


@dataclass(frozen=True)
class StepFrame:
    """What a target sends a router after one step (or after several, merged, when the reader lags)."""

    step: int
    load: LoadSnapshot
    results: tuple[StepResult, ...] = ()
    costs: StepCosts | None = None
    """What the target measured anew since the last frame."""


@dataclass(frozen=True)
class OpenDraft:
    """Start drafting for a sequence; `token_ids` are its committed tokens."""

    sequence: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    method: Method
    drafter: DrafterKind
    seed: int = 0
    choice_index: int = 0
    traceparent: str = ""
    cache_salt: bytes = b""
    traffic_class: str = ""
    remembers_output: bool = True


@dataclass(frozen=True)
class Propose:
    """Ask for up to `num_draft_tokens` drafts after `committed_length` committed tokens.

    `token_ids` are the committed tokens from position `from_length` on, so committed_length = from_length +
    len(token_ids); the drafter truncates what it has to the common prefix and appends these.
    """

    sequence: int
    from_length: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    span_id: int = 0
    """As `Verify.span_id`."""

    @property
    def committed_length(self) -> int:
        """Committed tokens before the first draft."""
        return self.from_length + len(self.token_ids)


@dataclass(frozen=True)
class DraftFrame:
    """What a router sends a draft service in one message; applied in the order opens, proposes, closes."""

    opens: tuple[OpenDraft, ...] = ()
    proposes: tuple[Propose, ...] = ()
    closes: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.opens or self.proposes or self.closes)


@dataclass(frozen=True)
class Draft:
    """One answer to Propose: maybe fewer tokens than asked for, maybe none.

    `q` is None for greedy and coupled requests and for one-hot drafts.
    """

    sequence: int
    committed_length: int
    token_ids: tuple[int, ...] = ()
    q: SparseDistributions | None = None
    seconds: float = 0.0
    error: SpecdecodeError | None = None


@dataclass(frozen=True)
class DraftsFrame:
    """What a draft service answers in one message."""

    drafts: tuple[Draft, ...] = ()


@dataclass(frozen=True)
class ModelInfo:
    """What a served model is: exchanged at start, so that mismatched pairs are refused."""

    name: str
    fingerprint: str
    """Hex digest of tokenizer and vocabulary; equal fingerprints mean equal ids for equal text."""
    vocab_size: int
    """Ids that may have mass; padding ids above it never do."""
    max_length: int
    """Longest sequence in tokens, prompt and output together."""
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...] = ()
    drafters: tuple[DrafterKind, ...] = ()
    """What a draft service offers; empty for a target."""
    num_parameters: int = 0
    block_size: int = 0
    num_blocks: int = 0
    version: str = ""
    """Package version of the service."""
    cores: str = ""
    """Equal for services that compute on the same processor cores; empty on an accelerator."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one request; emitted = accepted + bonus + recovered + plain."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_emitted: int = 0
    num_accepted: int = 0
    num_bonus: int = 0
    num_recovered: int = 0
    num_plain: int = 0
    num_drafted: int = 0
    num_rounds: int = 0
    """Verifications, with or without drafts."""
    num_failovers: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True)
class RoundRecord:
    """One round as told to a client that asks for rounds."""

    index: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    last_origin: Origin
    drafter: DrafterKind | None
    reason: str
    """Why γ was what it was (a constant of `router.policy.DecisionReason`)."""
    seconds: float = 0.0
    draft_seconds: float = 0.0
    times: StepTimes = field(default_factory=StepTimes)
    predicted_emitted: float = 0.0
    """When γ was decided; 0 where no decision was made (a lease that goes on), as the next two."""
    predicted_seconds: float = 0.0
    price: float = 0.0
    tokens_in_flight: int = 0
    """Of the step that verified."""
