"""`specdecode chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from contextlib import aclosing
from typing import Annotated

import typer

from specdecode.cli import show
from specdecode.cli.flags import ConnectionFlags, SamplingFlags, SpeculationFlags
from specdecode.cli.generate import open_router
from specdecode.client import Completion, RouterClient
from specdecode.errors import SpecdecodeError, UnavailableError
from specdecode.requests import ChatMessage, ChatPrompt, GenerateRequest

_HELP = "Ctrl-C interrupts a reply, /reset starts anew, /exit or Ctrl-D leaves"


def chat(
    sampling: SamplingFlags,
    speculation: SpeculationFlags,
    connection: ConnectionFlags,
    system: Annotated[
        str | None, typer.Option(help="System message before the conversation", show_default="none")
    ] = None,
) -> None:
    """Talk with the model.

    Asks a running router: one message a line, and the conversation is remembered. Ctrl-C interrupts a reply,
    /reset starts anew, /exit or Ctrl-D leaves.
    """
    beginning = () if system is None else (ChatMessage("system", system),)
    asked = GenerateRequest(None, sampling.options(), speculation.options())
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` editing and history)
    with asyncio.Runner() as runner:
        client = runner.run(open_router(connection))
        try:
            show.note(_HELP)
            _converse(runner, Conversation(client, asked, connection.timeout, beginning))
        finally:
            runner.run(client.close())


class Conversation:
    """What was said so far, and the router that answers."""

    def __init__(
        self,
        client: RouterClient,
        asked: GenerateRequest,
        timeout: float | None,
        beginning: tuple[ChatMessage, ...],
    ) -> None:
        self._client = client
        self._asked = asked
        self._timeout = timeout
        self._beginning = beginning
        self.messages = beginning

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = self._beginning

    async def reply(self, text: str) -> str:
        """Shows the reply to a message as it comes, and remembers both; one line about it.

        An interrupted reply is remembered as far as it came; a message that failed is forgotten.
        """
        messages = (*self.messages, ChatMessage("user", text))
        request = GenerateRequest(ChatPrompt(messages), self._asked.sampling, self._asked.speculation)
        completion = Completion(0)
        began = time.monotonic()
        try:
            async with aclosing(self._client.generate(request, timeout_seconds=self._timeout)) as pieces:
                async for piece in pieces:
                    completion.add(piece)
                    show.write(piece.text)
        finally:
            if completion.text:
                show.write("\n")
                self.messages = (*messages, ChatMessage("assistant", completion.text))
        seconds = time.monotonic() - began
        return show.summary(completion.usage, seconds, show.end_of(completion))


def _converse(runner: asyncio.Runner, conversation: Conversation) -> None:
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                conversation.reset()
                show.note("forgotten")
            case command if command.startswith("/"):
                show.note(f"no command {command}; {_HELP}")
            case text:
                _reply(runner, conversation, text)


def _read_line() -> str | None:
    """The next line; None when there are no more."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            show.note(f"\n{_HELP}")


def _reply(runner: asyncio.Runner, conversation: Conversation, text: str) -> None:
    try:
        show.note(runner.run(conversation.reply(text)))
    except KeyboardInterrupt:
        show.note("interrupted")
    except UnavailableError:
        raise
    except SpecdecodeError as error:
        show.complain(error)
