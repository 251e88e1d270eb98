"""Options of the commands: each declared once, with its default, its unit and its range.

A bundle is a frozen dataclass whose fields are options; a command that has a parameter of that type, and is
wrapped by `bundled`, gets all of them. Every option of a bundle can also be set by environment, as
SPECDECODE_ and its name, unless it names another variable or none.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import typer
from pydantic import TypeAdapter, ValidationError
from typer.models import OptionInfo

from specdecode.cli.file import ConfigFlag
from specdecode.config import ROUTER_PORT, Address
from specdecode.requests import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TRAFFIC_CLASS_CHARACTERS,
    MIN_TEMPERATURE,
    SamplingOptions,
    SpeculationMode,
    SpeculationOptions,
    Tier,
)
from specdecode.tls import ClientTls
from specdecode.types import MAX_DRAFT_TOKENS, DrafterKind, Method

DEFAULT_ADDRESS = f"127.0.0.1:{ROUTER_PORT}"
_MAX_UINT32 = 2**32 - 1
_MAX_SECONDS = 86_400.0

T = TypeVar("T")
Parser = Callable[[str], Any]


def refused(value: object, allowed: str) -> typer.BadParameter:
    """What a wrong value is answered with; typer puts the option's name before it."""
    return typer.BadParameter(f"{str(value)!r} is refused; allowed: {allowed}")


def checked(convert: Callable[[str], T], holds: Callable[[T], bool], allowed: str) -> Parser:
    """A parser that refuses what `convert` can't read and what doesn't hold."""

    def parse(text: str) -> T:
        try:
            value = convert(text)
        except ValueError:
            raise refused(text, allowed) from None
        if not holds(value):
            raise refused(text, allowed)
        return value

    return parse


def _count(what: str, unit: str, low: int, high: int, default: str, *names: str) -> Any:
    """An option that is an integer in [low, high]."""
    largest = {MAX_SEED: "2^64 - 1", _MAX_UINT32: "2^32 - 1"}.get(high, str(high))
    allowed = f"{low} to {largest}{unit and ' '}{unit}"
    parser = checked(int, lambda value: low <= value <= high, allowed)
    return typer.Option(
        *names, help=f"{what}; {allowed}", parser=parser, metavar="INTEGER", show_default=default
    )


def _real(what: str, allowed: str, holds: Callable[[float], bool], default: str) -> Any:
    """An option that is a number; NaN must not hold."""
    parser = checked(float, holds, allowed)
    return typer.Option(help=f"{what}; {allowed}", parser=parser, metavar="NUMBER", show_default=default)


def _within(what: str, low: float, high: float, default: str) -> Any:
    return _real(what, f"{low:g} to {high:g}", lambda value: low <= value <= high, default)


def _above_zero(what: str, high: float, default: str, unit: str = "") -> Any:
    allowed = f"above 0, to {high:g}{unit and ' '}{unit}"
    return _real(what, allowed, lambda value: 0 < value <= high, default)


def _choice(what: str, choices: type[Enum], default: str) -> Any:
    """An option that is a member of an enum, by its value."""
    values = [str(member.value) for member in choices]
    parser = checked(choices, lambda member: True, ", ".join(values))
    return typer.Option(help=what, parser=parser, metavar="|".join(values), show_default=default)


class TokenBias(NamedTuple):
    """One entry of --logit-bias."""

    token_id: int
    bias: float

    @classmethod
    def parse(cls, text: str) -> TokenBias:
        token_id, _, bias = text.partition("=")
        return cls(int(token_id), float(bias))


def _parse_address(text: str) -> str:
    try:
        return TypeAdapter(Address).validate_python(text)
    except ValidationError:
        raise refused(text, "host:port") from None


def _parse_key(text: str) -> str:
    """Where it comes from a file, other users of the machine don't see it among a process's arguments."""
    try:
        key = Path(text[1:]).read_text(encoding="utf-8").strip() if text.startswith("@") else text
    except (OSError, UnicodeDecodeError):
        raise refused(text, "a key, or @PATH of a readable file") from None
    if not key or not key.isascii() or not key.isprintable():
        raise typer.BadParameter("the key is empty or holds characters that no key has")
    return key


def _pem(what: str) -> Any:
    return typer.Option(help=f"{what}; a PEM file", metavar="PATH", show_default=False)


_STOP_LENGTHS = f"1 to {MAX_STOP_CHARACTERS} characters"
_TEMPERATURES = f"0 (greedy), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
_BIASES = f"ID=BIAS, biases from {-MAX_BIAS:g} to {MAX_BIAS:g}"
_IDS = "0 to 2^32 - 1"
_LABELS = f"up to {MAX_TRAFFIC_CLASS_CHARACTERS} printable characters"


def _is_temperature(value: float) -> bool:
    return value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE


def _is_stop(text: str) -> bool:
    return 1 <= len(text) <= MAX_STOP_CHARACTERS


def _is_label(text: str) -> bool:
    return len(text) <= MAX_TRAFFIC_CLASS_CHARACTERS and text.isprintable()


def _is_id(value: int) -> bool:
    return 0 <= value <= _MAX_UINT32


def _is_bias(value: TokenBias) -> bool:
    return _is_id(value.token_id) and -MAX_BIAS <= value.bias <= MAX_BIAS


@dataclass(frozen=True)
class TlsFlags:
    """How a service is called by TLS."""

    tls_ca: Annotated[str | None, _pem("TLS: authority of the router's certificate")] = None
    tls_cert: Annotated[str | None, _pem("TLS: own certificate, for a router that asks for one")] = None
    tls_key: Annotated[str | None, _pem("TLS: its private key")] = None
    tls_name: Annotated[
        str | None,
        typer.Option(
            help="TLS: name expected in the router's certificate",
            metavar="NAME",
            show_default="the address's host",
        ),
    ] = None

    @property
    def tls(self) -> ClientTls | None:
        """How the router is called; None: in plaintext.

        Raises:
            typer.BadParameter: options of TLS without an authority, or a certificate without a key.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise typer.BadParameter("belong together: set both, or none", param_hint="--tls-cert, --tls-key")
        if self.tls_ca is None and (self.tls_cert is not None or self.tls_name is not None):
            raise typer.BadParameter("needs --tls-ca", param_hint="--tls-cert, --tls-name")
        if self.tls_ca is None:
            return None
        return ClientTls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)


@dataclass(frozen=True)
class ConnectionFlags(TlsFlags):
    """Which router, and how long it may take."""

    address: Annotated[
        str,
        typer.Option(
            help="The router; host:port",
            parser=_parse_address,
            metavar="ADDRESS",
            show_default=DEFAULT_ADDRESS,
        ),
    ] = DEFAULT_ADDRESS
    timeout: Annotated[
        float | None, _above_zero("Give up after this time", _MAX_SECONDS, "never", "seconds")
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key, or @PATH of a file that holds it",
            parser=_parse_key,
            metavar="KEY",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class SamplingFlags:
    """How the next token is chosen, and when a text ends."""

    max_tokens: Annotated[int, _count("Longest text", "tokens", 1, _MAX_UINT32, "256")] = 256
    min_tokens: Annotated[int | None, _count("Shortest text", "tokens", 0, _MAX_UINT32, "0")] = None
    temperature: Annotated[float | None, _real("Randomness", _TEMPERATURES, _is_temperature, "1")] = None
    top_p: Annotated[
        float | None, _above_zero("Least mass of the most probable tokens to keep", 1, "1, off")
    ] = None
    top_k: Annotated[
        int | None, _count("Most probable tokens to keep", "tokens", 0, _MAX_UINT32, "0, off")
    ] = None
    min_p: Annotated[
        float | None, _within("Least probability, as a share of the largest one", 0, 1, "0, off")
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _above_zero("Divides logits of tokens that occurred", MAX_REPETITION_PENALTY, "1, off"),
    ] = None
    presence_penalty: Annotated[
        float | None, _within("Lowers tokens that were emitted", -MAX_PENALTY, MAX_PENALTY, "0, off")
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _within("Lowers tokens by how often they were emitted", -MAX_PENALTY, MAX_PENALTY, "0, off"),
    ] = None
    logit_bias: Annotated[
        list[TokenBias] | None,
        typer.Option(
            help=f"Added to a token's logit; {_BIASES}; up to {MAX_LOGIT_BIASES} times",
            parser=checked(TokenBias.parse, _is_bias, _BIASES),
            metavar="ID=BIAS",
            show_default="none",
        ),
    ] = None
    seed: Annotated[
        int | None, _count("Equal seeds give equal texts", "", 0, MAX_SEED, "none, another text each time")
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Ends the text before this string; {_STOP_LENGTHS}; up to {MAX_STOPS} times",
            parser=checked(str, _is_stop, _STOP_LENGTHS),
            metavar="TEXT",
            show_default="none",
        ),
    ] = None
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(
            help=f"Ends the text with this token; {_IDS}; up to {MAX_STOP_TOKEN_IDS} times",
            parser=checked(int, _is_id, _IDS),
            metavar="ID",
            show_default="the model's own",
        ),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-sequence tokens")
    ] = False

    def options(self, logprobs: int | None = None) -> SamplingOptions:
        """What the router is asked for."""
        return SamplingOptions(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias or ()),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            seed=self.seed,
        )


@dataclass(frozen=True)
class SpeculationFlags:
    """Whether, how far and by whom tokens are drafted."""

    speculation: Annotated[
        SpeculationMode, _choice("Draft tokens ahead; auto leaves it to the router", SpeculationMode, "auto")
    ] = SpeculationMode.AUTO
    num_draft_tokens: Annotated[
        int | None,
        _count("Most tokens drafted for one round", "tokens", 0, MAX_DRAFT_TOKENS, "the router's"),
    ] = None
    drafter: Annotated[DrafterKind | None, _choice("Who drafts", DrafterKind, "the router's choice")] = None
    method: Annotated[
        Method | None,
        _choice(
            "How drafts are verified; all give the target's distribution",
            Method,
            "greedy at temperature 0, coupled with a seed, else rejection",
        ),
    ] = None
    min_acceptance: Annotated[
        float | None,
        _within("Draft only while at least this share of tested drafts is accepted", 0, 1, "the router's"),
    ] = None
    tier: Annotated[
        Tier, _choice("What latency is worth: batch drafts only where all gain", Tier, "interactive")
    ] = Tier.INTERACTIVE
    traffic_class: Annotated[
        str,
        typer.Option(
            help=f"Label of requests that are alike, whose acceptance is learnt together; {_LABELS}",
            parser=checked(str, _is_label, _LABELS),
            metavar="TEXT",
            show_default="none",
        ),
    ] = ""
    forget_output: Annotated[
        bool, typer.Option("--forget-output", help="Let no later request be drafted for from this text")
    ] = False

    def options(self) -> SpeculationOptions:
        """What the router is asked for."""
        return SpeculationOptions(
            mode=self.speculation,
            num_draft_tokens=self.num_draft_tokens,
            drafter=self.drafter,
            method=self.method,
            min_acceptance=self.min_acceptance,
            tier=self.tier,
            traffic_class=self.traffic_class,
            remember_output=not self.forget_output,
        )


@dataclass(frozen=True)
class OutputFlags:
    """What `generate` shows."""

    n: Annotated[int, _count("Texts for the same prompt", "texts", 1, MAX_CHOICES, "1")] = 1
    logprobs: Annotated[
        int | None,
        _count("Show tokens with so many alternatives and logprobs", "tokens", 0, MAX_LOGPROBS, "none"),
    ] = None
    rounds: Annotated[bool, typer.Option("--rounds", help="Show what every round drafted and kept")] = False
    report: Annotated[
        bool, typer.Option("--report", help="Show what was measured about drafting, and what it brought")
    ] = False
    json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object a text, with ids, rounds and report"),
    ] = False


def bundled(command: Callable[..., None], prefix: str = "SPECDECODE_") -> Callable[..., None]:
    """The command with every parameter that is a bundle replaced by the bundle's options, and with --config.

    Args:
        prefix: of the variables of its options.
    """
    parameters: list[inspect.Parameter] = []
    bundles: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        annotation = parameter.annotation
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            bundles[parameter.name] = annotation
            parameters += _parameters_of(annotation, prefix)
        else:
            hint = _with_variable(f"{prefix}{parameter.name.upper()}", annotation, parameter.default)
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint))
    takes_config = any(parameter.name == "config" for parameter in parameters)
    if not takes_config:
        config = inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFlag
        )
        parameters.append(config)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        if not takes_config:
            del given["config"]
        for name, bundle in bundles.items():
            fields = {field.name: given.pop(field.name) for field in dataclasses.fields(bundle)}
            given[name] = bundle(**fields)
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters_of(bundle: type[Any], prefix: str) -> list[inspect.Parameter]:
    hints = get_type_hints(bundle, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_with_variable(f"{prefix}{field.name.upper()}", hints[field.name], field.default),
        )
        for field in dataclasses.fields(bundle)
    ]


def _with_variable(variable: str, hint: Any, default: object) -> Any:
    kind, declared = get_args(hint)
    if not isinstance(declared, OptionInfo) or declared.envvar is not None:
        return hint
    declared = copy.copy(declared)
    declared.envvar = variable
    if isinstance(declared.show_default, str):
        said = declared.show_default
    else:
        unsaid = default in (None, False, inspect.Parameter.empty)
        said = "" if unsaid else str(default.value if isinstance(default, Enum) else default)
    declared.help = f"{declared.help} {note(said, [variable])}"
    declared.show_default = declared.show_envvar = False
    return Annotated[kind, declared]


def note(default: str, variables: Sequence[str]) -> str:
    """The end of an option's help."""
    return f"({f'default: {default}; ' if default else ''}env: {', '.join(variables)})"
