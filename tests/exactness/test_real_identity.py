"""The real model through router, draft and target service: one text, whatever was drafted.

Temperature 0: transformers' own `generate`. With a seed: the same text at every γ, by either drafter, alone
or in a batch, and from another process. In float32; what counts as the same: `tests.exactness.reference`.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from specdecode import models, tokenizer
from specdecode.client import Completion, RouterClient
from specdecode.requests import (
    GenerateRequest,
    SamplingOptions,
    SpeculationMode,
    SpeculationOptions,
    TokenPrompt,
)
from specdecode.types import DrafterKind, SamplingParams
from tests.exactness import real_prompts
from tests.exactness.reference import (
    Choose,
    Chosen,
    Reference,
    Tokens,
    assert_excused,
    coupled,
    differences_of,
    greedy,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900, func_only=True)]

TARGET, DRAFT = "smollm2-135m-instruct", "smollm2-135m-instruct-draft"
MAX_TOKENS = 20
DEADLINE = 240.0
DEPTHS = (0, 1, 3, 8)
DRAFTERS = (DrafterKind.NGRAM, DrafterKind.MODEL)
# One thread each: two targets, drafter and reference work side by side.
MODEL_OPTIONS = ("--calibration=off", "--dtype=float32", "--num-threads=1", "--num-blocks=1200")


class Service:
    """A service in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._serving = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    @asynccontextmanager
    async def started(cls, module: str, *options: str) -> AsyncIterator[Service]:
        """Starts it; on leaving it ends by SIGTERM, and well."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, "--port=0", *options), stderr=asyncio.subprocess.PIPE
        )
        service = cls(process)
        try:
            yield service
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(process.wait(), DEADLINE)
            await service._reading
        assert code == 0

    async def address(self) -> str:
        """host:port, once it serves."""
        address: str = await asyncio.wait_for(asyncio.shield(self._serving), DEADLINE)
        return address

    async def _read(self) -> None:
        """Reads the whole log, or it would fill the pipe."""
        assert self._process.stderr is not None
        log = ""
        while line := (await self._process.stderr.readline()).decode():
            log += line
            found = re.search(r"serving .* on (127\.0\.0\.1:\d+)", line)
            if found is not None and not self._serving.done():
                self._serving.set_result(found[1])
        if not self._serving.done():
            self._serving.set_exception(AssertionError(log))


@asynccontextmanager
async def routed(targets: Sequence[Service], draft: Service) -> AsyncIterator[RouterClient]:
    """A client of a router of these."""
    addresses = ",".join([await target.address() for target in targets])
    options = [f"--model={TARGET}", f"--targets={addresses}", f"--draft={await draft.address()}"]
    async with (
        Service.started("router", *options, "--http-port=none", "--draft-deadline-seconds=60") as router,
        await RouterClient.open(await router.address()) as client,
    ):
        yield client


@dataclass(frozen=True)
class Models:
    """The services that run models."""

    targets: Sequence[Service]
    draft: Service


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def services() -> AsyncIterator[Models]:
    """Two targets and a draft service, each a process."""
    target = ("target_service", f"--model={TARGET}", *MODEL_OPTIONS)
    async with (
        Service.started(*target) as first,
        Service.started(*target) as second,
        Service.started("draft_service", f"--model={DRAFT}", *MODEL_OPTIONS) as draft,
    ):
        yield Models([first, second], draft)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(services: Models) -> AsyncIterator[RouterClient]:
    """A client of a router of both targets."""
    async with routed(services.targets, services.draft) as client:
        yield client


@pytest.fixture(scope="module")
def path() -> Path:
    return models.resolve(TARGET)


@pytest.fixture(scope="module")
def reference(path: Path) -> Iterator[Reference]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Reference(path, tokenizer.eos_token_ids(path, tokenizer.load_tokenizer(path)))
    torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Prompt:
    """A prompt and how a failure calls it."""

    name: str
    token_ids: Tokens


@pytest.fixture(scope="module")
def prompts(path: Path) -> list[Prompt]:
    """Eight each of chat, copy-heavy, code and other languages, four very short and four long ones."""
    tokens = tokenizer.load_tokenizer(path)
    made = []
    for question in real_prompts.CHAT:
        messages = [{"role": "user", "content": question}]
        text = tokens.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        made.append(Prompt(f"chat {question!r:.20}", tuple(tokens(text, add_special_tokens=False).input_ids)))
    for kind in ("COPY_HEAVY", "CODE", "OTHER_LANGUAGES", "VERY_SHORT", "LONG"):
        for text in getattr(real_prompts, kind):
            made.append(Prompt(f"{kind.lower()} {text!r:.20}", tuple(tokens(text).input_ids)))
    assert len(made) == 40
    assert all(150 < len(prompt.token_ids) < 300 for prompt in made[-4:])
    return made


@dataclass
class Total:
    """What all requests of some runs were told."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0

    def add(self, completion: Completion) -> None:
        usage = completion.usage
        assert len(completion.tokens) == usage.num_emitted
        assert usage.num_emitted == (
            usage.num_accepted + usage.num_bonus + usage.num_recovered + usage.num_plain
        )
        self.num_drafted += usage.num_drafted
        self.num_accepted += usage.num_accepted
        self.num_emitted += usage.num_emitted

    def assert_drafted(self, num_draft_tokens: int) -> None:
        """Some drafts were right and some wrong, or there were none."""
        if num_draft_tokens:
            assert 0 < self.num_accepted < self.num_drafted
        else:
            assert self.num_drafted == 0


def request_of(
    prompt: Prompt, sampling: SamplingOptions, num_draft_tokens: int, drafter: DrafterKind, n: int = 1
) -> GenerateRequest:
    mode = SpeculationMode.ON if num_draft_tokens else SpeculationMode.OFF
    speculation = SpeculationOptions(mode, num_draft_tokens, drafter)
    return GenerateRequest(TokenPrompt(prompt.token_ids), sampling, speculation, n)


async def texts(client: RouterClient, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
    """All choices of all requests, sent at once."""

    async def one(request: GenerateRequest) -> list[Completion]:
        completions = [Completion(choice) for choice in range(request.n or 1)]
        async for piece in client.generate(request, timeout_seconds=DEADLINE):
            completions[piece.choice].add(piece)
        for completion in completions:
            assert completion.error is None
        return completions

    return await asyncio.gather(*map(one, requests))


# Temperature 0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def generated(
    client: RouterClient, reference: Reference, prompts: list[Prompt]
) -> AsyncIterator[asyncio.Future[list[Chosen]]]:
    """Every prompt's text by transformers' generate, with margins; computed while the services work."""

    def generate() -> list[Chosen]:
        return [reference.generate(prompt.token_ids, MAX_TOKENS) for prompt in prompts]

    working = asyncio.ensure_future(asyncio.to_thread(generate))
    yield working
    await working


# The longest runs first: they need not wait for the reference.
@pytest.mark.parametrize("num_draft_tokens", [8, 3, 1, 0])
async def test_greedy_text_is_what_transformers_generates(
    num_draft_tokens: int,
    client: RouterClient,
    reference: Reference,
    prompts: list[Prompt],
    generated: asyncio.Future[list[Chosen]],
) -> None:
    sampling = SamplingOptions(temperature=0.0, max_tokens=MAX_TOKENS)
    runs = [(prompt, drafter) for drafter in DRAFTERS for prompt in prompts]
    requests = [request_of(prompt, sampling, num_draft_tokens, drafter) for prompt, drafter in runs]
    answers = await texts(client, requests)
    differences, total = [], Total()
    for (prompt, drafter), expected, (answer,) in zip(runs, 2 * await generated, answers, strict=True):
        total.add(answer)
        differences += reference.differences_from(
            f"{drafter.value}, {prompt.name}", prompt.token_ids, answer.token_ids, expected, greedy
        )
    assert_excused(differences, total.num_emitted)
    total.assert_drafted(num_draft_tokens)


# With a seed


@dataclass(frozen=True)
class Seeded:
    """A sampled request; its reals are float32, as they travel."""

    prompt: Prompt
    seed: int
    temperature: float
    top_p: float
    top_k: int

    def request(self, num_draft_tokens: int, drafter: DrafterKind, n: int = 1) -> GenerateRequest:
        sampling = SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            seed=self.seed,
        )
        return request_of(self.prompt, sampling, num_draft_tokens, drafter, n)

    def choose(self, choice_index: int = 0) -> Choose:
        sampling = SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        return coupled(sampling, self.seed, choice_index)


@pytest.fixture(scope="module")
def seeded(prompts: list[Prompt]) -> list[Seeded]:
    """Sixteen requests of all kinds with other temperatures, top-p, top-k and seeds."""
    temperatures, top_ps, top_ks = (0.7, 0.8, 1.0, 1.2), (0.9, 0.95, 0.8), (50, 0, 20, 200, 5)
    return [
        Seeded(
            *(prompt, 2**64 - 1 - 977 * index, float(np.float32(temperatures[index % 4]))),
            *(float(np.float32(top_ps[index % 3])), top_ks[index % 5]),
        )
        for index, prompt in enumerate([*prompts[0:36:3], *prompts[36:40]])
    ]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plain(client: RouterClient, reference: Reference, seeded: list[Seeded]) -> list[Chosen]:
    """Every request's text without speculation, all in one batch, which is the reference's."""
    answers = await texts(client, [entry.request(0, DrafterKind.NGRAM) for entry in seeded])
    chosen, differences = [], []
    for entry, (answer,) in zip(seeded, answers, strict=True):
        prompt, text = entry.prompt, answer.token_ids
        assert len(text) == MAX_TOKENS
        expected, margins = reference.judge(prompt.token_ids, text, entry.choose())
        differences += differences_of(f"plain, {prompt.name}", text, (expected, margins))
        chosen.append((list(text), margins))
    assert_excused(differences, len(seeded) * MAX_TOKENS)
    return chosen


@pytest.mark.parametrize("num_draft_tokens", DEPTHS[1:])
async def test_seeded_text_does_not_depend_on_depth_or_drafter(
    num_draft_tokens: int,
    client: RouterClient,
    reference: Reference,
    seeded: list[Seeded],
    plain: list[Chosen],
) -> None:
    """Two batches of sixteen: either drafter drafts for half of each, and then the other way round."""
    differences, total = [], Total()
    for first in (0, 1):
        drafters = [DRAFTERS[(first + index) % 2] for index in range(len(seeded))]
        requests = [
            entry.request(num_draft_tokens, drafter) for entry, drafter in zip(seeded, drafters, strict=True)
        ]
        answers = await texts(client, requests)
        for entry, drafter, expected, (answer,) in zip(seeded, drafters, plain, answers, strict=True):
            run, prompt = f"{drafter.value}, {entry.prompt.name}", entry.prompt.token_ids
            total.add(answer)
            differences += reference.differences_from(run, prompt, answer.token_ids, expected, entry.choose())
    assert_excused(differences, total.num_emitted)
    total.assert_drafted(num_draft_tokens)


async def test_seeded_text_does_not_depend_on_the_batch(
    client: RouterClient, reference: Reference, seeded: list[Seeded], plain: list[Chosen]
) -> None:
    """Two of the requests alone, one by each drafter, against what they got among all."""
    differences, total = [], Total()
    for index, drafter in zip((3, 4), DRAFTERS, strict=True):
        entry, prompt = seeded[index], seeded[index].prompt
        for num_draft_tokens in DEPTHS:
            ((answer,),) = await texts(client, [entry.request(num_draft_tokens, drafter)])
            run = f"alone, γ={num_draft_tokens}, {drafter.value}, {prompt.name}"
            total.add(answer)
            differences += reference.differences_from(
                run, prompt.token_ids, answer.token_ids, plain[index], entry.choose()
            )
    assert_excused(differences, total.num_emitted)


async def test_choices_differ_and_are_the_same_from_another_process(
    services: Models, reference: Reference, seeded: list[Seeded]
) -> None:
    chosen = seeded[:4]
    here, there = services.targets
    async with routed([here], services.draft) as client, routed([there], services.draft) as other:
        texts_here, texts_there = await asyncio.gather(
            texts(client, [entry.request(3, DrafterKind.MODEL, n=2) for entry in chosen]),
            texts(other, [entry.request(1, DrafterKind.NGRAM, n=2) for entry in chosen]),
        )
    differences, total = [], Total()
    for entry, *both in zip(chosen, texts_here, texts_there, strict=True):
        assert both[0][0].token_ids != both[0][1].token_ids
        for where, answers in zip(("here", "there"), both, strict=True):
            for choice_index, answer in enumerate(answers):
                run = f"{where}, choice {choice_index}, {entry.prompt.name}"
                total.add(answer)
                prompt, text = entry.prompt.token_ids, answer.token_ids
                judged = reference.judge(prompt, text, entry.choose(choice_index))
                differences += differences_of(run, text, judged)
    assert_excused(differences, total.num_emitted)
