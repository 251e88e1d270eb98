"""`specdecode generate` and `specdecode status`: one question to a running router."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated

import typer

from specdecode.cli import report, show
from specdecode.cli.flags import (
    DEFAULT_ADDRESS,
    ConnectionFlags,
    OutputFlags,
    SamplingFlags,
    SpeculationFlags,
)
from specdecode.client import STATUS_SECONDS, Completion, RouterClient, total_usage
from specdecode.errors import UnavailableError
from specdecode.requests import ChatMessage, ChatPrompt, GenerateRequest, Prompt, TextPrompt


@contextlib.asynccontextmanager
async def router(connection: ConnectionFlags) -> AsyncIterator[RouterClient]:
    """A connection; where there is none, the error says how to start a router."""
    async with await open_router(connection) as client:
        yield client


async def open_router(connection: ConnectionFlags) -> RouterClient:
    """As `router`, for whoever closes the connection itself."""
    address = connection.address
    try:
        return await RouterClient.open(address, tls=connection.tls, api_key=connection.api_key)
    except UnavailableError as error:
        if not error.message.startswith("no router answers"):
            raise
        hint = "" if address == DEFAULT_ADDRESS else f" --router-port {address.rsplit(':', 1)[1]}"
        message = f"{error.message}; start one with: specdecode up{hint} (or name another: --address)"
        raise UnavailableError(message, reason=error.reason) from None


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input")],
    sampling: SamplingFlags,
    speculation: SpeculationFlags,
    output: OutputFlags,
    connection: ConnectionFlags,
    chat: Annotated[bool, typer.Option("--chat", help="Answer the prompt as a chat message")] = False,
    system: Annotated[
        str | None, typer.Option(help="System message before the prompt; with --chat", show_default="none")
    ] = None,
) -> None:
    """Continue a text, or answer a message.

    Asks a running router; the text goes to standard output as it comes, all about it to standard error.
    """
    if system is not None and not chat:
        raise typer.BadParameter("needs --chat", param_hint="'--system'")
    request = GenerateRequest(
        prompt=_prompt(sys.stdin.read() if prompt == "-" else prompt, chat, system),
        sampling=sampling.options(output.logprobs),
        speculation=speculation.options(),
        n=output.n,
        include_rounds=output.rounds or output.json,
        include_report=output.report or output.json,
    )
    began = time.monotonic()
    completions = asyncio.run(_generate(request, output, connection))
    _report(completions, output, time.monotonic() - began)
    if any(completion.error for completion in completions):
        raise typer.Exit(1)


def _prompt(text: str, chat: bool, system: str | None) -> Prompt:
    if not chat:
        return TextPrompt(text)
    before = () if system is None else (ChatMessage("system", system),)
    return ChatPrompt((*before, ChatMessage("user", text)))


async def _generate(
    request: GenerateRequest, output: OutputFlags, connection: ConnectionFlags
) -> list[Completion]:
    """All choices; the only one's text is shown as it comes."""
    completions = [Completion(choice) for choice in range(output.n)]
    streams = output.n == 1 and not output.json
    async with (
        router(connection) as client,
        aclosing(client.generate(request, timeout_seconds=connection.timeout)) as pieces,
    ):
        try:
            async for piece in pieces:
                completions[piece.choice].add(piece)
                if streams:
                    show.write(piece.text)
        finally:
            if streams and completions[0].text:
                show.write("\n")
    return completions


def _report(completions: Sequence[Completion], output: OutputFlags, seconds: float) -> None:
    if output.json:
        for completion in completions:
            told = {"report": report.figures_json(completion.report)}
            show.write_json(show.completion_json(completion, seconds) | told)
        return
    for completion in completions:
        if output.n > 1:
            show.note(f"choice {completion.choice}", "bold")
            show.write(completion.text + "\n")
        _report_details(completion, output)
    end = show.end_of(completions[0]) if output.n == 1 else ""
    show.note(show.summary(total_usage(completions), seconds, end))


def _report_details(completion: Completion, output: OutputFlags) -> None:
    if completion.error is not None:
        show.complain(completion.error)
    if output.logprobs is not None:
        show.ERR.print(show.tokens_table(completion.tokens))
    if output.rounds:
        show.ERR.print(show.rounds_table(completion.rounds))
    if output.report and completion.report:
        for shown in report.tables(completion.report):
            show.ERR.print(shown)


def status(
    connection: ConnectionFlags,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Show a router's replicas and load."""

    async def ask() -> None:
        async with router(connection) as client:
            found = await client.get_status(timeout_seconds=connection.timeout or STATUS_SECONDS)
        if json:
            show.write_json(show.status_json(found))
            return
        requests = f"{found.num_requests} request{'' if found.num_requests == 1 else 's'}"
        show.say(f"router {found.version} at {connection.address}, {requests}")
        for table in show.status_tables(found):
            show.OUT.print(table)

    asyncio.run(ask())
