"""The operator's limits while the router runs: from what is asked for to what is in force. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from router.policy_settings import PolicySettings
from specdecode.errors import FieldViolation, InvalidArgumentError
from specdecode.requests import MAX_TOKENS_IN_FLIGHT, PolicyOptions
from specdecode.types import DrafterKind

_NAMES = tuple(field.name for field in fields(PolicyOptions))


def options_of(policy: PolicySettings) -> PolicyOptions:
    """What is in force, all of it."""
    values: dict[str, Any] = {name: getattr(policy, name) for name in _NAMES}
    return PolicyOptions(**values | {"max_tokens_in_flight": policy.max_tokens_in_flight or 0})


def changed(policy: PolicySettings, options: PolicyOptions) -> PolicySettings:
    """The policy with what is given in its place.

    Raises:
        InvalidArgumentError: with one violation for each field that is outside its range; nothing is changed.
    """
    violations: list[FieldViolation] = []
    for name, value in _given(policy, options):
        try:
            _check_tokens_in_flight(name, value)
            policy = replace(policy, **{name: value})
        except InvalidArgumentError as error:
            violations += [FieldViolation(f"policy.{v.field}", v.description) for v in error.violations]
    if violations:
        message = "; ".join(f"{entry.field}: {entry.description}" for entry in violations)
        raise InvalidArgumentError(message, violations=tuple(violations))
    return policy


def _given(policy: PolicySettings, options: PolicyOptions) -> Iterator[tuple[str, Any]]:
    """(name, value) of what is given, as the policy has it."""
    for name in _NAMES:
        value = getattr(options, name)
        if name == "min_acceptances":
            least: dict[DrafterKind, float] = dict(policy.min_acceptances) | dict(value)
            value = tuple(least.items()) if value else None
        if name == "max_tokens_in_flight" and value == 0:
            yield name, None
        elif value is not None:
            yield name, value


def _check_tokens_in_flight(name: str, value: Any) -> None:
    if name == "max_tokens_in_flight" and value is not None and value > MAX_TOKENS_IN_FLIGHT:
        raise InvalidArgumentError.of(name, f"{value} is above {MAX_TOKENS_IN_FLIGHT}")


def differences(before: PolicySettings, after: PolicySettings) -> str:
    """What was changed, in words; "" if nothing was."""
    old, new = options_of(before), options_of(after)
    changes = ((name, getattr(old, name), getattr(new, name)) for name in _NAMES)
    return ", ".join(f"{name} {_said(was)} -> {_said(now)}" for name, was, now in changes if was != now)


def _said(value: object) -> str:
    if isinstance(value, tuple):
        return "{" + ", ".join(f"{drafter.value}: {share:g}" for drafter, share in value) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
