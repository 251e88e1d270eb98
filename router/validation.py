"""From what a client asked for to what is run: every default applied, every limit checked, before any work.

Limits are those that router_service.proto states, and those of the models. All that is wrong with the options
is said at once; the prompt is looked at after that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from router.chat import text_size, texts_of
from router.text import Tokenizer
from specdecode.config import RouterSettings
from specdecode.errors import FieldViolation, InvalidArgumentError, Reason
from specdecode.requests import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_CONVERSATION_CHARACTERS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SALT_BYTES,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TRAFFIC_CLASS_CHARACTERS,
    MIN_TEMPERATURE,
    ChatPrompt,
    GenerateRequest,
    SamplingOptions,
    SpeculationMode,
    SpeculationOptions,
    TextPrompt,
    Tier,
    TokenPrompt,
)
from specdecode.types import MAX_DRAFT_TOKENS, DrafterKind, Method, SamplingParams


@dataclass(frozen=True)
class OperatorLimits:
    """What the operator allows below what the models and the API do; None: no less."""

    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_choices: int = MAX_CHOICES
    max_stops: int = MAX_STOPS
    max_logprobs: int = MAX_LOGPROBS

    @classmethod
    def of(cls, settings: RouterSettings) -> OperatorLimits:
        """What the settings say."""
        return cls(
            settings.max_prompt_tokens,
            settings.max_output_tokens,
            settings.max_choices,
            settings.max_stops,
            settings.max_logprobs,
        )


@dataclass(frozen=True)
class ModelLimits:
    """What the models and the operator allow."""

    vocab_size: int
    max_length: int
    """Tokens of the longest sequence, prompt and output."""
    max_prompt_bytes: int
    operator: OperatorLimits = OperatorLimits()


@dataclass(frozen=True)
class ResolvedRequest:
    """A request that can be run."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...]
    method: Method
    seed: int
    n: int
    mode: SpeculationMode
    num_draft_tokens: int | None
    """Cap on γ; None: the operator's default."""
    drafter: DrafterKind | None
    """None: the router's choice."""
    include_rounds: bool
    cache_salt: bytes
    min_acceptance: float | None = None
    """None: the operator's."""
    tier: Tier = Tier.INTERACTIVE
    traffic_class: str = ""
    remember_output: bool = True
    include_report: bool = False
    conversation: str = ""


_LARGE = 4096
"""Characters and ids from which a request is worth a thread of its own."""


async def resolve(request: GenerateRequest, tokenizer: Tokenizer, limits: ModelLimits) -> ResolvedRequest:
    """The request with all defaults applied, found beside the event loop where that takes long.

    Raises:
        InvalidArgumentError: with one violation for each field that is outside its range.
    """
    if _size(request) < _LARGE:
        return resolve_now(request, tokenizer, limits)
    return await asyncio.to_thread(resolve_now, request, tokenizer, limits)


def _size(request: GenerateRequest) -> int:
    """Characters and ids."""
    options = request.sampling
    listed = len(options.allowed_token_ids or ()) + len(options.banned_token_ids)
    match request.prompt:
        case TextPrompt(text):
            return listed + len(text)
        case ChatPrompt(messages) as chat:
            return listed + text_size(chat) + len(messages)
        case TokenPrompt(token_ids):
            return listed + len(token_ids)
        case None:
            return listed


def resolve_now(request: GenerateRequest, tokenizer: Tokenizer, limits: ModelLimits) -> ResolvedRequest:
    """The request with all defaults applied.

    Raises:
        InvalidArgumentError: with one violation for each field that is outside its range.
    """
    options, speculation = request.sampling, request.speculation
    stop_token_ids = _stop_token_ids(options, tokenizer)
    checks = _Checks()
    _check_options(checks, options, stop_token_ids, limits)
    _check_speculation(checks, options, speculation)
    n = 1 if request.n is None else request.n
    checks.in_range("n", n, 1, limits.operator.max_choices)
    salt_bytes = len(request.cache_salt)
    checks.require(salt_bytes <= MAX_SALT_BYTES, "cache_salt", _at_most(salt_bytes, MAX_SALT_BYTES, "bytes"))
    length = len(request.conversation)
    fits = length <= MAX_CONVERSATION_CHARACTERS
    checks.require(fits, "conversation", _at_most(length, MAX_CONVERSATION_CHARACTERS, "characters"))
    checks.finish()
    prompt_token_ids = _tokenise(request, tokenizer, limits)
    method = _method(options, speculation)
    max_tokens = _max_tokens(options, limits.max_length - len(prompt_token_ids), limits.operator)
    return ResolvedRequest(
        prompt_token_ids=prompt_token_ids,
        sampling=_sampling(options, stop_token_ids, max_tokens, limits.vocab_size),
        stops=tuple(dict.fromkeys(options.stop)),
        method=method,
        seed=_seed(options, method),
        n=n,
        mode=speculation.mode,
        num_draft_tokens=speculation.num_draft_tokens,
        drafter=speculation.drafter,
        include_rounds=request.include_rounds,
        cache_salt=request.cache_salt,
        min_acceptance=speculation.min_acceptance,
        tier=speculation.tier,
        traffic_class=speculation.traffic_class,
        remember_output=speculation.remember_output,
        include_report=request.include_report,
        conversation=request.conversation,
    )


class _Checks:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def require(self, holds: bool, field: str, description: str) -> None:
        if not holds:
            self._violations.append(FieldViolation(field, description))

    def in_range(self, field: str, value: float | None, low: float, high: float) -> None:
        """NaN lies in no range; None is the default and fine."""
        if value is not None:
            self.require(low <= value <= high, field, f"{value:g} is outside {low:g} to {high:g}")

    def finish(self) -> None:
        if self._violations:
            message = "; ".join(f"{entry.field}: {entry.description}" for entry in self._violations)
            raise InvalidArgumentError(message, violations=tuple(self._violations))


def _at_most(count: int, limit: int, what: str) -> str:
    return f"{count} {what}; at most {limit}"


def _check_options(
    checks: _Checks, options: SamplingOptions, stop_token_ids: Sequence[int], limits: ModelLimits
) -> None:
    _check_numbers(checks, options)
    checks.in_range("sampling.logprobs", options.logprobs, 0, limits.operator.max_logprobs)
    _check_stops(checks, options, limits.operator.max_stops)
    _check_ids(checks, options, limits.vocab_size)
    _check_mass(checks, options, stop_token_ids, limits.vocab_size)


def _check_numbers(checks: _Checks, options: SamplingOptions) -> None:
    temperature = options.temperature
    if temperature is not None and not (temperature == 0 or temperature >= MIN_TEMPERATURE * 0.999):
        checks.require(
            False,
            "sampling.temperature",
            f"{temperature:g} is outside 0, {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        )
    else:
        checks.in_range("sampling.temperature", temperature, 0, MAX_TEMPERATURE)
    checks.in_range("sampling.top_k", options.top_k, 0, 2**32 - 1)
    checks.in_range("sampling.min_p", options.min_p, 0, 1)
    for name, value, high in (
        ("top_p", options.top_p, 1),
        ("repetition_penalty", options.repetition_penalty, MAX_REPETITION_PENALTY),
    ):
        if value is not None:
            checks.require(0 < value <= high, f"sampling.{name}", f"{value:g} is outside (0, {high:g}]")
    checks.in_range("sampling.presence_penalty", options.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    checks.in_range("sampling.frequency_penalty", options.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    checks.in_range("sampling.seed", options.seed, 0, MAX_SEED)


def _check_stops(checks: _Checks, options: SamplingOptions, max_stops: int) -> None:
    count = len(options.stop)
    checks.require(count <= max_stops, "sampling.stop", _at_most(count, max_stops, "strings"))
    for index, stop in enumerate(options.stop[:MAX_STOPS]):
        allowed = 1 <= len(stop) <= MAX_STOP_CHARACTERS
        description = f"{len(stop)} characters; 1 to {MAX_STOP_CHARACTERS}"
        checks.require(allowed, f"sampling.stop[{index}]", description)
    count = len(options.stop_token_ids)
    limit = _at_most(count, MAX_STOP_TOKEN_IDS, "ids")
    checks.require(count <= MAX_STOP_TOKEN_IDS, "sampling.stop_token_ids", limit)


def _check_ids(checks: _Checks, options: SamplingOptions, vocab_size: int) -> None:
    biased = [token_id for token_id, _ in options.logit_bias]
    for name, ids in (
        ("logit_bias", biased),
        ("allowed_token_ids", options.allowed_token_ids or ()),
        ("banned_token_ids", options.banned_token_ids),
        ("stop_token_ids", options.stop_token_ids),
    ):
        _require_ids(checks, f"sampling.{name}", ids, vocab_size)
    limit = _at_most(len(biased), MAX_LOGIT_BIASES, "biases")
    checks.require(len(biased) <= MAX_LOGIT_BIASES, "sampling.logit_bias", limit)
    checks.require(len(set(biased)) == len(biased), "sampling.logit_bias", "one id is biased twice")
    for index, (_, bias) in enumerate(options.logit_bias[:MAX_LOGIT_BIASES]):
        checks.in_range(f"sampling.logit_bias[{index}].bias", bias, -MAX_BIAS, MAX_BIAS)


def _require_ids(checks: _Checks, field: str, ids: Sequence[int], vocab_size: int) -> None:
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            description = f"{token_id} is outside the vocabulary, 0 to {vocab_size - 1}"
            checks.require(False, f"{field}[{index}]", description)
            return


def _check_mass(
    checks: _Checks, options: SamplingOptions, stop_token_ids: Sequence[int], vocab_size: int
) -> None:
    """At every position some id must be left that may be sampled."""
    allowed = options.allowed_token_ids
    banned = set(options.banned_token_ids)
    if options.min_tokens:
        banned |= set(stop_token_ids)
    if allowed is not None:
        left = len(set(allowed) - banned)
        checks.require(left > 0, "sampling.allowed_token_ids", "leaves no id that may be sampled")
    else:
        checks.require(len(banned) < vocab_size, "sampling.banned_token_ids", "leaves no id to sample")


def _check_speculation(checks: _Checks, options: SamplingOptions, speculation: SpeculationOptions) -> None:
    checks.in_range("speculation.num_draft_tokens", speculation.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
    checks.in_range("speculation.min_acceptance", speculation.min_acceptance, 0, 1)
    _check_traffic_class(checks, speculation.traffic_class)
    method, greedy = speculation.method, options.temperature == 0
    if method is None:
        return
    name = method.value
    if greedy:
        fits = method is Method.GREEDY
        checks.require(fits, "speculation.method", f"{name} needs a temperature above 0; 0 is greedy")
    else:
        fits = method is not Method.GREEDY
        checks.require(fits, "speculation.method", "greedy needs temperature 0")
    if options.seed is not None and not greedy:
        fits = method not in (Method.REJECTION, Method.BLOCK)
        checks.require(fits, "sampling.seed", f"equal seeds give equal text with coupled, not with {name}")


def _check_traffic_class(checks: _Checks, label: str) -> None:
    """It is shown in tables, logs and dashboards."""
    field, limit = "speculation.traffic_class", MAX_TRAFFIC_CLASS_CHARACTERS
    checks.require(len(label) <= limit, field, _at_most(len(label), limit, "characters"))
    checks.require(label.isprintable(), field, "holds characters that can't be printed")


def _tokenise(request: GenerateRequest, tokenizer: Tokenizer, limits: ModelLimits) -> tuple[int, ...]:
    longest = limits.max_length - 1
    match request.prompt:
        case None:
            raise InvalidArgumentError.of("prompt", "is missing; text, chat or token_ids")
        case TextPrompt(text):
            field = "text"
            _check_prompt_bytes(field, [text], tokenizer, limits)
            token_ids = tokenizer.encode_text(text)
        case ChatPrompt(messages) as chat:
            field = "chat"
            _check_prompt_bytes(field, texts_of(chat) if messages else (), tokenizer, limits)
            token_ids = tokenizer.encode_chat(chat)
        case TokenPrompt(token_ids):
            field = "token_ids"
            checks = _Checks()
            _require_ids(checks, "token_ids.ids", token_ids[: longest + 1], limits.vocab_size)
            checks.finish()
    if not token_ids:
        raise InvalidArgumentError.of(field, "is empty; at least 1 token")
    if len(token_ids) > longest:
        limit = f"{_at_most(len(token_ids), longest, 'tokens')}, one less than the context"
        raise InvalidArgumentError.of(field, limit, Reason.CONTEXT_EXCEEDED)
    allowed = limits.operator.max_prompt_tokens
    if allowed is not None and len(token_ids) > allowed:
        limit = f"{_at_most(len(token_ids), allowed, 'tokens')}, the operator's max_prompt_tokens"
        raise InvalidArgumentError.of(field, limit)
    return token_ids


def _check_prompt_bytes(field: str, texts: Sequence[str], tokenizer: Tokenizer, limits: ModelLimits) -> None:
    """Refuses what is empty, and what can't fit whatever its tokens are, before any tokenising."""
    if not any(texts):
        raise InvalidArgumentError.of(field, "is empty; at least 1 token")
    limit = min(limits.max_prompt_bytes, limits.max_length * tokenizer.max_token_bytes)
    size = sum(len(text.encode()) for text in texts)
    if size > limit:
        raise InvalidArgumentError.of(field, _at_most(size, limit, "bytes"))


def _max_tokens(options: SamplingOptions, room: int, operator: OperatorLimits) -> int:
    longest, whose = room, "the room that the prompt leaves in the context"
    if operator.max_output_tokens is not None and operator.max_output_tokens < room:
        longest, whose = operator.max_output_tokens, "the operator's max_output_tokens"
    max_tokens = longest if options.max_tokens is None else options.max_tokens
    min_tokens = options.min_tokens or 0
    checks = _Checks()
    in_room = f"{max_tokens} is outside 1 to {longest}, {whose}"
    checks.require(1 <= max_tokens <= longest, "sampling.max_tokens", in_room)
    above = f"{min_tokens} is outside 0 to {max_tokens}, max_tokens"
    checks.require(0 <= min_tokens <= max_tokens, "sampling.min_tokens", above)
    checks.finish()
    return max_tokens


def _stop_token_ids(options: SamplingOptions, tokenizer: Tokenizer) -> tuple[int, ...]:
    eos = () if options.ignore_eos else tokenizer.eos_token_ids
    return tuple(sorted({*eos, *options.stop_token_ids}))


def _sampling(
    options: SamplingOptions, stop_token_ids: tuple[int, ...], max_tokens: int, vocab_size: int
) -> SamplingParams:
    allowed = options.allowed_token_ids
    top_k = options.top_k or 0
    return SamplingParams(
        repetition_penalty=_or(options.repetition_penalty, 1.0),
        presence_penalty=_or(options.presence_penalty, 0.0),
        frequency_penalty=_or(options.frequency_penalty, 0.0),
        logit_bias=tuple(sorted(options.logit_bias)),
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
        banned_token_ids=tuple(sorted(set(options.banned_token_ids))),
        temperature=_or(options.temperature, 1.0),
        top_k=top_k if top_k < vocab_size else 0,
        top_p=_or(options.top_p, 1.0),
        min_p=_or(options.min_p, 0.0),
        max_tokens=max_tokens,
        min_tokens=options.min_tokens or 0,
        stop_token_ids=stop_token_ids,
        logprobs=options.logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _method(options: SamplingOptions, speculation: SpeculationOptions) -> Method:
    if options.temperature == 0:
        return Method.GREEDY
    if speculation.method is not None:
        return speculation.method
    return Method.REJECTION if options.seed is None else Method.COUPLED


def _seed(options: SamplingOptions, method: Method) -> int:
    if options.seed is not None:
        return options.seed
    return secrets.randbits(63) if method is Method.COUPLED else 0
