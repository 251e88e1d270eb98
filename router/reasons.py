"""Why a round was drafted as far as it was: the words of the policy, the guards and the rounds."""

from __future__ import annotations

from enum import Enum, StrEnum, auto


class DecisionReason(StrEnum):
    """Why γ was what it was."""

    SPECULATING = "speculating"
    PROBE = "probe"
    """A short draft to learn whether drafting has come to pay."""
    REQUEST_OFF = "request_off"
    """The request wants no drafts."""
    CAPPED = "capped"
    """The request caps γ at 0."""
    CAP_DRAFT_TOKENS = "cap_draft_tokens"
    """The operator caps γ at 0."""
    CAP_TOKENS_IN_FLIGHT = "cap_tokens_in_flight"
    """The operator's cap on tokens in flight leaves no room for drafts."""
    TEMPERATURE = "temperature"
    """The request's temperature is above the operator's limit for drafting."""
    UNSUPPORTED = "unsupported"
    """The drafter can't draft for this request at all: it refused its sampling parameters or its tokens."""
    UNCALIBRATED = "uncalibrated"
    """What steps or drafts cost is not measured yet."""
    COST = "cost"
    """No draft is worth the step time that it would take."""
    TIER_BATCH = "tier_batch"
    """As COST, where a draft would have been worth it for an interactive request."""
    ACCEPTANCE = "acceptance"
    """Too few of the last tested drafts were accepted."""
    KV_PRESSURE = "kv_pressure"
    """Drafts would need KV blocks that are not free."""
    NO_DRAFTER = "no_drafter"
    """Nobody offers the drafter that the request wants."""
    DRAFTER_UNAVAILABLE = "drafter_unavailable"
    """The draft service can't be reached, or could not draft for this sequence."""
    DRAFTER_LATE = "drafter_late"
    """No answer at the deadline, or none yet to what was asked in an earlier round."""
    DRAFT_EMPTY = "draft_empty"
    """The drafter had nothing to propose."""
    DRAFT_INVALID = "draft_invalid"
    """The drafter's answer could not be what was asked for."""
    CONTEXT_FULL = "context_full"
    """The drafter's context holds no draft after what is committed."""
    LAST_TOKEN = "last_token"
    """One token is left, and the target adds it itself."""
    FIRST_TOKEN = "first_token"
    """The first round on a replica, while the drafter takes in the prompt."""
    LEASE = "lease"
    """A lease given before still runs; drafting follows it."""


class DrafterState(Enum):
    """Whether a drafter can be asked for a sequence."""

    READY = auto()
    UNAVAILABLE = auto()
    LATE = auto()
    UNSUPPORTED = auto()
