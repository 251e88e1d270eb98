"""`specdecode up`: the three services of one machine in the foreground."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Coroutine, Sequence
from enum import Enum, auto
from typing import Any

import typer
from rich.text import Text

from specdecode.cli import show
from specdecode.cli.flags import DEFAULT_ADDRESS
from specdecode.cli.plan import StackFlags, plan
from specdecode.cli.stack import Child, Service, Stack
from specdecode.serving import first_of

_COLOURS = {"router": "cyan", "draft": "magenta", "target": "green"}
_LEVELS = {"DEBUG": "dim", "INFO": "", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}
_RECORD = re.compile(r"\d{4}-\d\d-\d\dT(?P<time>\d\d:\d\d:\d\d)\.\d+Z (?P<level>[A-Z]+) \S+ (?P<message>.*)")

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


def up(flags: StackFlags) -> None:
    """Start all three services.

    They run on this machine, in the foreground. Ctrl-C refuses new requests, lets running ones finish, and
    stops; a second Ctrl-C stops at once.

    Whatever has no option here is set by the services' own variables (SPECDECODE_TARGET_NAME,
    SPECDECODE_DRAFT_NAME, SPECDECODE_ROUTER_NAME) or in the file: python -m target_service --help lists them,
    as python -m draft_service --help and python -m router --help do.
    """
    raise typer.Exit(asyncio.run(_up(plan(flags))))


class _Event(Enum):
    READY = auto()
    """What was waited for is there."""
    DIED = auto()
    STOPPED = auto()


async def _up(services: Sequence[Service]) -> int:
    """The exit code: 0 when ended by a signal in good order, else 1."""
    stop, kill = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (kill if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does with SIGHUP
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
    async with Stack(services, log) as stack:
        with show.OUT.status("starting"):
            event = await _first_event(stack, stop, stack.serving(stack.children, _report))
        in_order = True
        if event is _Event.READY:
            _introduce(stack.children[-1].service)
            event = await _end(stack, stop)
            _say_why(stack, event)
            stop.set()
            in_order = await first_of(stack.drain(), kill.wait()) == 0
        else:
            # Nothing was served yet that is worth waiting for.
            _say_why(stack, event)
    show.say("stopped; nothing is left running")
    return 0 if event is _Event.STOPPED and in_order else 1


async def _end(stack: Stack, stop: asyncio.Event) -> _Event:
    """Why it ends: not for a draft service that dies; requests go on without it until it is back."""
    starting: list[Child] = []
    pause = 0.0
    while True:
        ready = stack.serving(starting, _report) if starting else asyncio.Event().wait()
        event = await _first_event(stack, stop, ready)
        if event is _Event.READY:
            starting, pause = [], 0.0
            continue
        dead = stack.ended
        if event is _Event.STOPPED or not all(child.service.optional for child in dead):
            return event
        # One that dies while it starts will do so again: it must not take the others' time.
        pause = min(max(2 * pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS) if starting else 0.0
        for child in dead:
            when = f" in {pause:g} s" if pause else ""
            show.say(f"{child.service.name} {child.how_it_ended}; starting it again{when}", "bold red")
        event = await _first_event(stack, stop, asyncio.sleep(pause), besides=dead)
        if event is not _Event.READY:
            return event
        starting = await stack.start_again(dead)


async def _first_event(
    stack: Stack, stop: asyncio.Event, ready: Coroutine[Any, Any, object], besides: Sequence[Child] = ()
) -> _Event:
    """`besides`: who has died already."""
    return list(_Event)[await first_of(ready, stack.died(besides), stop.wait())]


def _say_why(stack: Stack, event: _Event) -> None:
    if event is _Event.STOPPED:
        show.say("stopping router, draft and target, in this order; Ctrl-C again ends them at once", "bold")
    for child in stack.ended:
        if event is _Event.DIED:
            show.say(f"{child.service.name} {child.how_it_ended}; stopping the others", "bold red")


def log(service: str, line: str) -> None:
    """Print one line of a service: its name, and the record without what the name says already."""
    text = Text(f"{service:>6} ", style=_COLOURS.get(service, ""))
    if (record := _RECORD.fullmatch(line)) is None:
        text.append(line, style="default")
    else:
        level = "" if record["level"] == "INFO" else f"{record['level']} "
        text.append(f"{record['time']} ", style="dim")
        text.append(f"{level}{record['message']}", style=_LEVELS.get(record["level"], ""))
    show.OUT.print(text, soft_wrap=True)


def _report(service: Service, seconds: float) -> None:
    show.say(f"{service.name:>6} ready at {service.address} after {seconds:.1f} s", "bold")


def _introduce(router: Service) -> None:
    where = "" if router.address == DEFAULT_ADDRESS else f" --address {router.address}"
    show.say(f"router at {router.address}; try, in another terminal:", "bold")
    show.say(f'  specdecode generate "Why is the sky blue?" --chat{where}')
    if router.url:
        show.say(f"OpenAI's API at {router.url}/v1, and a page that shows rounds at {router.url}/", "bold")
    show.say("Ctrl-C stops", "dim")
