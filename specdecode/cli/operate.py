"""`specdecode figures`, `policy show`, `policy set`: what operators ask a running router, and set of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from specdecode.cli import report, show
from specdecode.cli.flags import ConnectionFlags, bundled, checked
from specdecode.cli.generate import router
from specdecode.client import STATUS_SECONDS, RouterClient
from specdecode.requests import LEASE_SECONDS, MAX_TEMPERATURE, MAX_TOKENS_IN_FLIGHT, PolicyOptions
from specdecode.types import MAX_DRAFT_TOKENS, DrafterKind

T = TypeVar("T")


def _ask(connection: ConnectionFlags, call: Callable[[RouterClient, float], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with router(connection) as client:
            return await call(client, connection.timeout or STATUS_SECONDS)

    return asyncio.run(ask())


def figures(
    connection: ConnectionFlags,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Show what a router measured about speculation.

    All rounds since it started, by temperature, traffic class, drafter and method. Rows with a drafter are of
    rounds that asked it for drafts, whether or not any came; rows without are of plain decoding.
    """
    found = _ask(connection, lambda client, seconds: client.get_figures(timeout_seconds=seconds))
    if json:
        show.write_json({"figures": report.figures_json(found)})
    elif not found:
        show.say("no rounds yet")
    else:
        for shown in report.tables(found):
            show.OUT.print(shown)


def _limit(what: str, allowed: str, convert: Callable[[str], T], holds: Callable[[T], bool]) -> Any:
    # An empty `envvar`: what is in force for all should not change by a variable that is set for one request.
    return typer.Option(
        help=f"{what}; {allowed}",
        parser=checked(convert, holds, allowed),
        metavar="INTEGER" if convert is int else "NUMBER",
        show_default=False,
        show_envvar=False,
        envvar=[],
    )


def _tokens(what: str, high: int) -> Any:
    return _limit(what, f"0 to {high} tokens", int, lambda value: 0 <= value <= high)


def _within(what: str, low: float, high: float, unit: str = "") -> Any:
    allowed = f"{low:g} to {high:g}{unit and ' '}{unit}"
    return _limit(what, allowed, float, lambda value: low <= value <= high)


class LeastAcceptance(NamedTuple):
    """One entry of --min-acceptance; None: of all drafters that have none of their own."""

    drafter: DrafterKind | None
    share: float

    @classmethod
    def parse(cls, text: str) -> LeastAcceptance:
        name, equals, share = text.rpartition("=")
        return cls(DrafterKind(name) if equals else None, float(share))


_SHARES = "SHARE or DRAFTER=SHARE, shares from 0 to 1"


@dataclass(frozen=True)
class PolicyFlags:
    """The operator's limits; what is not given stays as it is."""

    enabled: Annotated[
        bool | None,
        typer.Option("--on/--off", help="Draft at all", show_default=False, show_envvar=False, envvar=[]),
    ] = None
    max_draft_tokens: Annotated[
        int | None, _tokens("Most tokens drafted for one round, whatever is asked for", MAX_DRAFT_TOKENS)
    ] = None
    num_draft_tokens: Annotated[
        int | None, _tokens("The same for requests that name no cap", MAX_DRAFT_TOKENS)
    ] = None
    max_tokens_in_flight: Annotated[
        int | None,
        _tokens("Tokens of one step beyond which nothing is drafted, 0 for no cap", MAX_TOKENS_IN_FLIGHT),
    ] = None
    min_acceptance: Annotated[
        list[LeastAcceptance] | None,
        typer.Option(
            help=f"Least share of tested drafts accepted, of all drafters or of one; {_SHARES}; repeatable",
            parser=checked(LeastAcceptance.parse, lambda entry: 0 <= entry.share <= 1, _SHARES),
            metavar="[DRAFTER=]SHARE",
            show_default=False,
            show_envvar=False,
            envvar=[],
        ),
    ] = None
    max_temperature: Annotated[
        float | None, _within("Draft for requests up to this temperature", 0, MAX_TEMPERATURE)
    ] = None
    lease_seconds: Annotated[
        float | None,
        _within("How long a target goes on without asking where drafts may pay", *LEASE_SECONDS, "seconds"),
    ] = None
    batch_weight: Annotated[
        float | None,
        _limit(
            "What a token of tier batch is worth of an interactive one",
            "above 0, to 1",
            float,
            lambda value: 0 < value <= 1,
        ),
    ] = None

    def options(self) -> PolicyOptions:
        """What the router is told."""
        least = self.min_acceptance or []
        general = [entry.share for entry in least if entry.drafter is None]
        return PolicyOptions(
            enabled=self.enabled,
            num_draft_tokens=self.num_draft_tokens,
            max_draft_tokens=self.max_draft_tokens,
            max_tokens_in_flight=self.max_tokens_in_flight,
            min_acceptance=general[-1] if general else None,
            min_acceptances=tuple((drafter, share) for drafter, share in least if drafter is not None),
            max_temperature=self.max_temperature,
            lease_seconds=self.lease_seconds,
            batch_weight=self.batch_weight,
        )


policy = typer.Typer(help="Show or change a running router's limits on speculation.", no_args_is_help=True)


def show_policy(
    connection: ConnectionFlags,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Show the limits that are in force."""
    found = _ask(connection, lambda client, seconds: client.get_policy(timeout_seconds=seconds))
    _report(found, json)


def set_policy(
    limits: PolicyFlags,
    connection: ConnectionFlags,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Change limits, and show all that are in force then.

    They hold from the next round on, also for requests that run; what is not given stays as it is. A router
    that starts anew has those of its settings.
    """
    options = limits.options()
    if options == PolicyOptions():
        raise typer.BadParameter("name at least one limit to change")
    found = _ask(connection, lambda client, seconds: client.set_policy(options, timeout_seconds=seconds))
    _report(found, json)


policy.command("show")(bundled(show_policy))
policy.command("set")(bundled(set_policy))


def _report(found: PolicyOptions, json: bool) -> None:
    if json:
        least = {drafter.value: share for drafter, share in found.min_acceptances}
        show.write_json(asdict(found) | {"min_acceptances": least})
        return
    shown = show.table(("limit", "left"), ("in force", "left"))
    for name, value in _rows(found):
        shown.add_row(name, value)
    show.OUT.print(shown)


def _rows(found: PolicyOptions) -> list[tuple[str, str]]:
    return [
        ("speculation", "on" if found.enabled else "off"),
        ("max draft tokens", str(found.max_draft_tokens)),
        ("num draft tokens", f"{found.num_draft_tokens} for requests that name no cap"),
        ("max tokens in flight", str(found.max_tokens_in_flight or "no cap")),
        ("min acceptance", f"{found.min_acceptance:g}; none for drafters that cost next to nothing"),
        *((f"min acceptance, {drafter.value}", f"{share:g}") for drafter, share in found.min_acceptances),
        ("max temperature", f"{found.max_temperature:g}"),
        ("lease", f"{found.lease_seconds:g} s"),
        ("batch weight", f"{found.batch_weight:g}"),
    ]
