"""What clients say to the router and hear from it, as frozen dataclasses, and what they may ask for at most.

`specdecode.client` speaks in these, the router checks and answers in them, `specdecode.wire` translates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from specdecode.errors import SpecdecodeError
from specdecode.figures import Figures
from specdecode.types import (
    DrafterKind,
    FinishReason,
    LoadSnapshot,
    Method,
    ModelInfo,
    Origin,
    RoundRecord,
    TokenLogprobs,
    Usage,
)

MAX_CHOICES = 16
MAX_LOGIT_BIASES = 300
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LISTED_TOKEN_IDS = 2**18
"""Ids of one list of allowed or banned ones."""
MAX_CHAT_MESSAGES = 2**14
MAX_TOOLS = 256
MAX_LOGPROBS = 20
MAX_SALT_BYTES = 256
MAX_TRAFFIC_CLASS_CHARACTERS = 64
MAX_CONVERSATION_CHARACTERS = 128
MAX_TOKENS_IN_FLIGHT = 2**18
"""Largest cap on query tokens of one step."""
LEASE_SECONDS = (0.001, 60.0)
PIECE_SECONDS = 0.008
"""A client's text gathers for this long, for each request that is open beside it."""
LONGEST_PIECE_SECONDS = 0.4
"""No client waits longer for the next piece of a text that goes on."""
MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 1e-5
"""Below it logits divided by the temperature leave float32; 0 is greedy."""
MAX_REPETITION_PENALTY = 2.0
MAX_PENALTY = 2.0
"""Presence and frequency penalty, in both directions."""
MAX_BIAS = 100.0
"""Logit bias, in both directions."""
MAX_SEED = 2**64 - 1


class SpeculationMode(Enum):
    """Whether a request may speculate."""

    AUTO = "auto"
    """The router decides."""
    ON = "on"
    OFF = "off"


class Tier(Enum):
    """What a request's time is worth."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    """Latency does not matter: drafts only where they raise the throughput of all."""


class TraceDetail(Enum):
    """How much of a request its trace tells, if it is sampled."""

    ROUNDS = "rounds"
    """A span for each round, with spans of the services below it."""
    EVENTS = "events"
    """One span, with an event for each round."""
    REQUEST = "request"
    """One span."""


@dataclass(frozen=True)
class TextPrompt:
    """Tokenised as is, with the tokenizer's own special tokens."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant made.

    Attributes:
        id: by which a message of role "tool" answers it.
        arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """One message of a chat.

    Attributes:
        role: "system", "user", "assistant", "tool" or whatever else the model's template knows.
        tool_calls: of the assistant.
        tool_call_id: the call that a message of role "tool" answers.
        name: of the speaker or the tool; "" for none.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Tool:
    """A function that the assistant may ask for.

    Attributes:
        parameters: JSON Schema of its arguments, as text; "" for none.
    """

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True)
class ChatPrompt:
    """Messages, and the tools there are, for the model's chat template."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids as they are."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True)
class SamplingOptions:
    """What a client asks for; None takes the default that router_service.proto states."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class SpeculationOptions:
    """How a client wants to be drafted for; None is the router's choice."""

    mode: SpeculationMode = SpeculationMode.AUTO
    num_draft_tokens: int | None = None
    drafter: DrafterKind | None = None
    method: Method | None = None
    min_acceptance: float | None = None
    tier: Tier = Tier.INTERACTIVE
    traffic_class: str = ""
    """Label of requests that are alike: their acceptance is learnt together."""
    remember_output: bool = True
    """Whether later requests of the same label and salt may be drafted for from this output."""


@dataclass(frozen=True)
class GenerateRequest:
    """One request; nothing of it is checked yet."""

    prompt: Prompt | None
    sampling: SamplingOptions = SamplingOptions()
    speculation: SpeculationOptions = SpeculationOptions()
    n: int | None = None
    model: str = ""
    include_rounds: bool = False
    cache_salt: bytes = b""
    include_report: bool = False
    trace_detail: TraceDetail | None = None
    """None: as the router is configured."""
    conversation: str = ""
    """Requests of one conversation stay on one replica while that pays."""


@dataclass(frozen=True)
class PolicyOptions:
    """The operator's limits on speculation: None leaves one as it is; what is in force has them all.

    Attributes:
        enabled: whether anything is drafted at all.
        num_draft_tokens: cap on γ of requests that name none.
        max_draft_tokens: cap on γ of all requests.
        max_tokens_in_flight: query tokens of one step beyond which nothing is drafted; 0: no cap.
        min_acceptance: accepted / (accepted + rejected) below which a drafter rests; of requests that name
            none, and drafters that cost more than next to nothing.
        min_acceptances: (drafter, the same for this one); drafters that are not named keep theirs.
        max_temperature: requests above it are not drafted for.
        lease_seconds: after which the router has control back where it may want to draft.
        batch_weight: what an emitted token of tier batch is worth of an interactive one.
    """

    enabled: bool | None = None
    num_draft_tokens: int | None = None
    max_draft_tokens: int | None = None
    max_tokens_in_flight: int | None = None
    min_acceptance: float | None = None
    min_acceptances: tuple[tuple[DrafterKind, float], ...] = ()
    max_temperature: float | None = None
    lease_seconds: float | None = None
    batch_weight: float | None = None


class EmittedToken(NamedTuple):
    """One token of a choice."""

    token_id: int
    origin: Origin
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Move:
    """A choice left a replica before it ended.

    Attributes:
        address: of the replica that it left.
        reason: a constant of `specdecode.errors.Reason`.
        num_emitted: tokens of the choice that had been emitted.
    """

    address: str
    reason: str
    num_emitted: int


@dataclass(frozen=True)
class Piece:
    """What the router says of one choice at once; `text` is the text of `tokens`.

    Attributes:
        finish_reason: on the last piece of the choice.
        stop: the stop string that ended the choice, if one did.
        usage: on the last piece of the choice; the prompt is counted with choice 0.
        error: instead of a finish reason, when this choice alone failed.
        report: on the last piece of the choice, where it was asked for: one entry for each drafter that was
            asked, and one for rounds that asked nobody.
        moves: on the last piece of the choice.
    """

    request_id: str
    choice: int
    text: str = ""
    tokens: tuple[EmittedToken, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    usage: Usage | None = None
    error: SpecdecodeError | None = None
    report: tuple[Figures, ...] = ()
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True)
class ReplicaStatus:
    """One target or draft service as the router sees it."""

    address: str
    connected: bool
    model: ModelInfo | None
    load: LoadSnapshot | None
    num_sequences: int


@dataclass(frozen=True)
class RouterStatus:
    """What GetStatus tells."""

    targets: tuple[ReplicaStatus, ...]
    drafts: tuple[ReplicaStatus, ...]
    num_requests: int
    version: str
