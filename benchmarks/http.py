"""`make bench-http`: what the HTTP front costs beside gRPC, streams that wait, and the page's first paint.

Both fronts answer the same prompts through the same services, in turns, speculation off: a pair of runs has
had the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.progress import track

from benchmarks.http_worker import Client, body_of
from benchmarks.in_process import NUM_BLOCKS, add_model_options
from benchmarks.jobs import Job, JobPrompt
from benchmarks.pictures import Panel, draw_panels
from benchmarks.processes import ProcessFailedError, Services, Worker, stop_on_signals
from benchmarks.prompts import PromptKind, prompts_of
from benchmarks.results import QUICK_RESULTS, RESULTS, Bar, Estimate, bar_of, begin, median_of, paired_ratio
from router.text import Tokenizer
from specdecode import models
from specdecode.requests import ChatMessage, ChatPrompt

LEAST_RATIO = 0.96
MOST_IDLE_CPU = 0.01
MOST_PAINT_SECONDS = 0.3
IDLE_SECONDS = 5.0
"""Short of the time after which a router gives up a target that says nothing."""
NUM_PAINTS = 7


@dataclass(frozen=True)
class Run:
    """One job by one front.

    Attributes:
        seconds: from the first request's start to the last token.
    """

    front: str
    turn: int
    num_tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


def jobs_for(model: str, streams: int, max_tokens: int, turn: int) -> Job:
    """Prompts that no other turn has cached."""
    tokenizer = Tokenizer(models.resolve(model))
    prompts = [prompt.text for prompt in prompts_of(PromptKind.FREE_FORM, streams)]
    read = [tokenizer.encode_chat(ChatPrompt((ChatMessage("user", text),))) for text in prompts]
    return Job(tuple(map(JobPrompt, prompts, read)), max_tokens, salt=f"turn {turn}")


def measure_turns(workers: dict[str, Worker], model: str, options: argparse.Namespace) -> list[Run]:
    """Every front in every turn, in an order that changes; the first turn only warms up."""
    runs = []
    for turn in track(range(options.repeats + 1), "measured"):
        job = jobs_for(model, options.streams, options.tokens, turn)
        fronts = list(workers)
        for front in fronts[turn % 2 :] + fronts[: turn % 2]:
            # Of its own: the second front of a turn would find the first one's prompts in the cache.
            own = Job(job.prompts, job.max_tokens, f"{job.salt} {front}")
            answer = workers[front].run(own)
            if turn:
                runs.append(Run(front, turn, answer.usage["num_emitted"], answer.seconds))
    return runs


async def idle_share(services: Services, model: str, count: int) -> float:
    """CPU seconds a second of a router whose `count` streams all wait for their next token."""
    target, _, router = (process.popen.pid for process in services.processes)
    client = Client(services.http_address)
    job = jobs_for(model, count, 256, turn=-1)
    bodies = (body_of(job, index, prompt) for index, prompt in enumerate(job.prompts))
    streams = await asyncio.gather(*map(client.begin, bodies))
    await asyncio.gather(*(reader.readuntil(b"data: ") for reader, _ in streams))
    os.kill(target, signal.SIGSTOP)
    try:
        await asyncio.sleep(1.0)  # what was on its way arrives
        before, began = sum(psutil.Process(router).cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(IDLE_SECONDS)
        used = sum(psutil.Process(router).cpu_times()[:2]) - before
        return used / (time.monotonic() - began)
    finally:
        os.kill(target, signal.SIGCONT)
        for _, writer in streams:
            writer.close()


def first_paints(url: str, count: int) -> list[float]:
    """Seconds from the navigation's start to the page's first contentful paint; none without a browser."""
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        print("no chromium and chromedriver here: the page is not measured", file=sys.stderr)
        return []
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = Chrome(options=options, service=Service(driver_path))
    try:
        return [_first_paint(driver, url) for _ in range(count + 1)][1:]
    finally:
        driver.quit()


_PAINT = """
const done = arguments[0];
new PerformanceObserver((list) => {
  const entry = list.getEntriesByName("first-contentful-paint")[0];
  if (entry) done(entry.startTime);
}).observe({ type: "paint", buffered: true });
"""


def _first_paint(driver: object, url: str) -> float:
    from selenium.webdriver.remote.webdriver import WebDriver

    assert isinstance(driver, WebDriver)
    driver.get("about:blank")
    driver.get(url)
    return float(driver.execute_async_script(_PAINT)) / 1000


def bars_of(streams: int, ratio: Estimate, idle: float, waiting: int, paints: Sequence[float]) -> list[Bar]:
    """The promises."""
    name = f"HTTP over gRPC, {streams} streams, tok/s"
    bars = [
        bar_of(name, ratio, LEAST_RATIO, "at_least"),
        Bar(
            f"CPU of a router with {waiting} streams that wait, share of a core",
            idle,
            MOST_IDLE_CPU,
            "at_most",
        ),
    ]
    if paints:
        paint = median_of(paints)
        bars.append(bar_of("first paint of the page, s", paint, MOST_PAINT_SECONDS, "at_most"))
    return bars


def speeds_of(runs: Sequence[Run], front: str) -> list[float]:
    """In the order of turns."""
    return [run.speed for run in runs if run.front == front]


def main() -> int:
    """Measures and writes; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--streams", type=int, default=16, help="texts at once (default: 16)")
    parser.add_argument("--tokens", type=int, default=96, help="of each text (default: 96)")
    parser.add_argument("--repeats", type=int, default=8, help="turns that count (default: 8)")
    parser.add_argument("--waiting", type=int, default=200, help="streams that wait (default: 200)")
    parser.add_argument("--quick", action="store_true", help="one short turn, written to build/results")
    o = parser.parse_args()
    if o.quick:
        o.streams, o.tokens, o.repeats, o.waiting = 4, 16, 1, 16
    stop_on_signals()
    session = begin("http", {**vars(o), "num_blocks": NUM_BLOCKS})
    service = ["--device", o.device, "--dtype", o.dtype, "--num-threads", str(o.threads)]
    with tempfile.TemporaryDirectory(prefix="specdecode-bench-") as logs, ExitStack() as stack:
        try:
            target = [*service, "--num-blocks", str(2 * NUM_BLOCKS)]
            services = Services(stack, o.model, target, Path(logs), o.threads, http=True)
            workers = {
                "gRPC": _worker(stack, "client_worker", services.address, Path(logs)),
                "HTTP": _worker(stack, "http_worker", services.http_address, Path(logs)),
            }
            runs = measure_turns(workers, o.model, o)
            paints = first_paints(f"http://{services.http_address}/", 1 if o.quick else NUM_PAINTS)
            idle = asyncio.run(idle_share(services, o.model, o.waiting))
        except (ProcessFailedError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
    speeds = {front: speeds_of(runs, front) for front in workers}
    ratio = paired_ratio(speeds["HTTP"], speeds["gRPC"])
    panel = Panel(
        f"{o.streams} streams", {"": {front: median_of(values) for front, values in speeds.items()}}
    )
    path = session.write(
        QUICK_RESULTS if o.quick else RESULTS,
        [asdict(run) for run in runs],
        {
            "speed": {front: median_of(values).to_json() for front, values in speeds.items()},
            "ratio": ratio.to_json(),
            "idle_cpu": idle,
            "first_paints": paints,
            "first_paint": statistics.median(paints) if paints else None,
        },
        bars_of(o.streams, ratio, idle, o.waiting, paints),
        lambda path: draw_panels(path, "The same texts by both fronts", [[panel]], "tok/s"),
    )
    print(f"written: {path}")
    return 0


def _worker(stack: ExitStack, module: str, address: str, logs: Path) -> Worker:
    worker = Worker(module, [f"benchmarks.{module}", address], logs, threads=1)
    stack.callback(worker.stop)
    worker.wait_until_ready()
    return worker


if __name__ == "__main__":
    sys.exit(main())
