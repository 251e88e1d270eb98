"""What a request's own span says: OpenTelemetry's conventions for generative AI, and what they lack."""

from __future__ import annotations

from dataclasses import fields

from router.request import Request
from router.tracing import RequestTrace
from specdecode.errors import CancelledError, SpecdecodeError
from specdecode.requests import ChatPrompt, GenerateRequest
from specdecode.telemetry import Value
from specdecode.types import Usage

PROVIDER = "specdecode"


def end_span(
    trace: RequestTrace,
    asked: GenerateRequest,
    model: str,
    request: Request | None,
    refusal: SpecdecodeError | None,
) -> None:
    """Ends a request's span.

    Args:
        model: that is served.
        request: what ran; None if nothing did.
        refusal: why nothing ran.
    """
    operation = "chat" if isinstance(asked.prompt, ChatPrompt) else "text_completion"
    errors = [] if request is None else [c.error for c in request.choices if c.error is not None]
    failures = [error for error in errors if not isinstance(error, CancelledError)]
    failure = next(iter(failures), refusal)
    attributes: dict[str, Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": asked.model or model,
        "gen_ai.request.stream": True,
        "gen_ai.request.seed": asked.sampling.seed,
        "error.type": None if failure is None else failure.reason.value,
        "specdecode.outcome": _outcome(failure, bool(errors)),
        **({} if request is None else _of_request(request, model)),
    }
    trace.end(
        f"{operation} {asked.model or model}",
        attributes,
        None if failure is None else failure.message,
        failed=bool(failures),
    )


def _outcome(failure: SpecdecodeError | None, cancelled: bool) -> str:
    if failure is not None:
        return "failed"
    return "cancelled" if cancelled else "finished"


def _of_request(request: Request, model: str) -> dict[str, Value | None]:
    resolved, usage = request.resolved, total_usage(request)
    sampling = resolved.sampling
    reasons = tuple("error" if c.finish_reason is None else c.finish_reason.value for c in request.choices)
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": resolved.n,
        "gen_ai.response.id": request.id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_emitted,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
        "specdecode.rounds": usage.num_rounds,
        "specdecode.drafted": usage.num_drafted,
        "specdecode.accepted": usage.num_accepted,
        "specdecode.bonus": usage.num_bonus,
        "specdecode.recovered": usage.num_recovered,
        "specdecode.plain": usage.num_plain,
        "specdecode.failovers": usage.num_failovers,
        "specdecode.preemptions": usage.num_preemptions,
        "specdecode.method": resolved.method.value,
        "specdecode.mode": resolved.mode.value,
        "specdecode.tier": resolved.tier.value,
        "specdecode.traffic_class": resolved.traffic_class or None,
    }


def total_usage(request: Request) -> Usage:
    """Of all choices."""
    usages = [choice.usage for choice in request.choices]
    return Usage(*(sum(getattr(usage, field.name) for usage in usages) for field in fields(Usage)))
