"""Fields of OpenAI's API and of vLLM's extensions that are not served, and what becomes of them.

A field that would change the text is refused, unless it has a value that changes nothing. A field that
changes nothing of a text is accepted. Whatever nobody here knows is ignored, as everywhere, and its name is
sent back in a header: that is how a misspelt one is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdecode.errors import FieldViolation, InvalidArgumentError

_GRAMMAR = "output can't be constrained to a grammar or schema yet"
_TEMPLATE = "the model's own chat template is used as it is"
_RAW_LOGPROBS = "logprobs of prompts are not computed"

_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "functions": ((), "is deprecated; send tools"),
    "function_call": (("none",), "is deprecated; send tools"),
    "audio": ((), "only text is served"),
    "modalities": ((["text"],), "only text is served"),
    "web_search_options": ((), "there is no search"),
    "guided_json": ((), _GRAMMAR),
    "guided_regex": ((), _GRAMMAR),
    "guided_choice": ((), _GRAMMAR),
    "guided_grammar": ((), _GRAMMAR),
    "structured_outputs": ((), _GRAMMAR),
    "bad_words": (([],), "is not served; ban ids by logit_bias"),
    "use_beam_search": ((False,), "texts are sampled or greedy"),
    "prompt_logprobs": ((), _RAW_LOGPROBS),
    "truncate_prompt_tokens": ((), "prompts are not cut"),
    "include_stop_str_in_output": ((False,), "stop strings are cut from the text"),
    "skip_special_tokens": ((True,), "special tokens have no text"),
    "chat_template": ((), _TEMPLATE),
    "chat_template_kwargs": (({},), _TEMPLATE),
    "documents": (([],), _TEMPLATE),
    "add_generation_prompt": ((True,), _TEMPLATE),
    "continue_final_message": ((False,), _TEMPLATE),
    "logits_processors": (([],), "code of clients is not run"),
}

_WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "reasoning_effort", "verbosity", "request_id", "priority"),
        *("spaces_between_special_tokens", "length_penalty", "best_of", "add_special_tokens"),
    )
)


def check_extra(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Names that are ignored, of fields beside those that bodies declare.

    Raises:
        InvalidArgumentError: names every one that would have changed the text.
    """
    violations = []
    for name, value in fields.items():
        harmless, why = _REFUSED.get(name, (None, ""))
        if harmless is not None and value is not None and value not in harmless:
            violations.append(FieldViolation(name, why))
    if violations:
        message = "; ".join(f"{entry.field}: {entry.description}" for entry in violations)
        raise InvalidArgumentError(message, violations=tuple(violations))
    return tuple(name for name in fields if name not in _REFUSED and name not in _WITHOUT_EFFECT)


def check_response_format(value: Mapping[str, Any] | None) -> None:
    """Refuses all but text."""
    if value is not None and value.get("type") != "text":
        raise InvalidArgumentError.of("response_format", _GRAMMAR)


def check_tool_choice(value: object) -> None:
    """Refuses what would force a call."""
    if value is not None and value not in ("none", "auto"):
        raise InvalidArgumentError.of("tool_choice", f"{_GRAMMAR}; send 'none' or 'auto'")


def check_tool_strict(index: int, extra: Mapping[str, Any]) -> None:
    """Refuses a promise about arguments."""
    if extra.get("strict"):
        raise InvalidArgumentError.of(f"tools[{index}].function.strict", _GRAMMAR)
