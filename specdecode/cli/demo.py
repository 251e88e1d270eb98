"""`specdecode demo`: three services, three prompts, and the proof that speculation changes no text."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import typer
from rich.rule import Rule

from specdecode.cli import show
from specdecode.cli.models import fetch_shown
from specdecode.cli.plan import StackFlags, plan
from specdecode.cli.stack import Child, Service, Stack, is_free
from specdecode.client import Completion, RouterClient
from specdecode.config import DEFAULT_MODEL
from specdecode.errors import SpecdecodeError, UnavailableError
from specdecode.requests import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingOptions,
    SpeculationMode,
    SpeculationOptions,
    TextPrompt,
)
from specdecode.serving import first_of
from specdecode.types import DrafterKind

DRAFT_MODEL = f"{DEFAULT_MODEL}-draft"
_TIMEOUT_SECONDS = 300.0
_CONNECT_SECONDS = 30.0
_POLL_SECONDS = 0.05
_LOG_LINES = 30

_COPIED = """\
The first version of the text:

The lighthouse stands on a narrow rock, an hour by boat from the village. Its keeper climbs the stairs each \
evening, lights the lamp, and writes the weather into a book with a blue cover.

The second version of the text, copied without changes:

"""


@dataclass(frozen=True)
class Case:
    """One prompt of the demo."""

    title: str
    prompt: Prompt
    sampling: SamplingOptions
    speculation: SpeculationOptions

    def request(self, mode: SpeculationMode) -> GenerateRequest:
        """The request with or without speculation; either has to compute the whole prompt."""
        speculation = replace(self.speculation, mode=mode)
        salt = f"{self.title} {mode.value}".encode()
        return GenerateRequest(self.prompt, self.sampling, speculation, include_rounds=True, cache_salt=salt)


CASES = (
    Case(
        "copy-heavy, temperature 0, n-gram drafter",
        TextPrompt(_COPIED),
        SamplingOptions(temperature=0.0, max_tokens=64),
        SpeculationOptions(num_draft_tokens=6, drafter=DrafterKind.NGRAM),
    ),
    Case(
        "chat, temperature 0, model drafter",
        ChatPrompt((ChatMessage("user", "Write a short poem about the sea."),)),
        SamplingOptions(temperature=0.0, max_tokens=40),
        SpeculationOptions(num_draft_tokens=3, drafter=DrafterKind.MODEL),
    ),
    Case(
        "sampled, temperature 0.8, seed 7, model drafter",
        ChatPrompt((ChatMessage("user", "Write a short poem about a lighthouse."),)),
        SamplingOptions(temperature=0.8, seed=7, max_tokens=40),
        SpeculationOptions(num_draft_tokens=3, drafter=DrafterKind.MODEL),
    ),
)


@dataclass(frozen=True)
class Run:
    """One answer and how long it took, in seconds."""

    completion: Completion
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return show.rate(self.completion.usage, self.seconds)


def demo() -> None:
    """See it work on a real model.

    Fetches SmolLM2-135M-Instruct once, starts the three services on free ports of this machine in float32,
    streams the answers to three prompts with speculation on, shows every round, and asks again with
    speculation off: the texts must be identical. Then it stops everything. Exit code 1 if anything of that
    does not hold.
    """
    fetch_shown([DEFAULT_MODEL, DRAFT_MODEL])
    raise typer.Exit(asyncio.run(_demo(plan(_flags()))))


def _flags() -> StackFlags:
    return StackFlags(
        model=DEFAULT_MODEL,
        draft_model=DRAFT_MODEL,
        dtype="float32",
        kv_memory="256MiB",
        router_port="0",
        target_port="0",
        draft_port="0",
        http_port="none",
        # On a busy machine drafts would be late, and the rounds go on without them.
        draft_deadline_seconds="10",
    )


async def _demo(services: Sequence[Service]) -> int:
    """The exit code."""
    began = time.monotonic()
    lines: deque[str] = deque(maxlen=_LOG_LINES)
    async with Stack(services, lambda name, line: lines.append(f"{name:>6} {line}")) as stack:
        try:
            identical = await _show_cases(stack)
            await stack.drain()
        except SpecdecodeError:
            show.note("\n".join(lines))
            raise
    left = [what for child in stack.children for what in _left_of(child)]
    for what in left:
        show.say(what, "bold red")
    if not left:
        names = ", ".join(child.service.name for child in reversed(stack.children))
        seconds = time.monotonic() - began
        show.say(f"stopped {names}: no process and no open port is left; {seconds:.1f} s in all", "bold")
    return 0 if identical and not left else 1


def _left_of(child: Child) -> list[str]:
    """What is left of a service that should be gone."""
    service, pid = child.service, child.process.pid
    host, port = service.address.rsplit(":", 1)
    found = [] if child.ended else [f"{service.name} still runs as process {pid}"]
    try:
        os.killpg(pid, 0)
        found.append(f"{service.name} left a process in group {pid}")
    except ProcessLookupError:
        pass
    return found if is_free(host, int(port)) else [*found, f"{service.name} left port {port} open"]


async def _show_cases(stack: Stack) -> bool:
    """Whether all texts are the same with and without speculation."""
    verdicts: list[bool] = []

    async def show_all() -> None:
        with show.OUT.status("starting target, draft and router"):
            await stack.serving(stack.children, _report)
        async with await RouterClient.open(stack.children[-1].service.address) as client:
            await _connected(client)
            for number, case in enumerate(CASES, start=1):
                show.OUT.print(Rule(f"{number} of {len(CASES)}: {case.title}", align="left"))
                verdicts.append(await _show_case(client, case))

    if await first_of(show_all(), stack.died()) == 1:
        ended = next(child for child in stack.children if child.ended)
        raise UnavailableError(f"{ended.service.name} {ended.how_it_ended}")
    return all(verdicts)


async def _connected(client: RouterClient) -> None:
    """Until the router, which serves as soon as it has a target, has its draft service too."""
    async with asyncio.timeout(_CONNECT_SECONDS):
        while True:
            status = await client.get_status()
            if all(draft.connected for draft in status.drafts):
                return
            await asyncio.sleep(_POLL_SECONDS)


def _report(service: Service, seconds: float) -> None:
    show.say(f"{service.name:>6} ready at {service.address} after {seconds:.1f} s", "dim")


async def _show_case(client: RouterClient, case: Case) -> bool:
    """Whether the text is the same with and without speculation."""
    for line in _prompt_text(case.prompt).splitlines():
        show.say(f"> {line}".rstrip(), "dim")
    on = await _run(client, case.request(SpeculationMode.ON), shown=True)
    show.write("\n")
    show.OUT.print(show.rounds_table(on.completion.rounds))
    with show.OUT.status("the same with speculation off"):
        off = await _run(client, case.request(SpeculationMode.OFF))
    return _compare(on, off)


def _prompt_text(prompt: Prompt) -> str:
    match prompt:
        case TextPrompt(text):
            return text.rstrip("\n")
        case ChatPrompt(messages):
            return "\n".join(f"{message.role}: {message.content}" for message in messages)
        case _:
            return ""


async def _run(client: RouterClient, request: GenerateRequest, shown: bool = False) -> Run:
    completion = Completion(0)
    began = time.monotonic()
    async with aclosing(client.generate(request, timeout_seconds=_TIMEOUT_SECONDS)) as pieces:
        async for piece in pieces:
            completion.add(piece)
            if shown:
                show.write(piece.text)
    return Run(completion, time.monotonic() - began)


def _compare(on: Run, off: Run) -> bool:
    usage = on.completion.usage
    per_round = usage.num_emitted / max(usage.num_rounds, 1)
    accepted = usage.num_accepted / max(usage.num_drafted, 1)
    drafts = f"{usage.num_accepted} of {usage.num_drafted} drafts accepted ({accepted:.0%})"
    show.say(f"{usage.num_emitted} tokens in {usage.num_rounds} rounds · {drafts} · {per_round:.2f} a round")
    speeds = f"{on.rate:.1f} tok/s with speculation, {off.rate:.1f} without"
    show.say(f"{speeds}: {on.rate / off.rate:.2f} times the speed")
    same = (on.completion.text, on.completion.token_ids) == (off.completion.text, off.completion.token_ids)
    answer, style = ("yes", "green") if same else ("no", "bold red")
    show.say(f"identical text with speculation off: {answer}", style)
    if not same:
        show.say(f"without speculation: {off.completion.text}", "red")
    return same
