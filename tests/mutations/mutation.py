"""What a mutation is, and where the tests stand that should notice one."""

from __future__ import annotations

from dataclasses import dataclass

ENUMERATION = "tests/exactness/test_verification_enumeration.py::"
SAMPLING = "tests/exactness/test_sampling.py::"
NOISE = "tests/exactness/test_noise.py::"
ORACLES = "tests/exactness/test_engine_on_oracles.py::"
ENGINE = "tests/target/test_engine.py::"
ROWS = "tests/target/test_rows.py::"
POOL = "tests/lm/test_pool.py::"
PAGED = "tests/lm/test_paged_attention.py::"
KERNELS = "tests/lm/test_cpu_kernels.py::"
SAMPLING_KERNELS = "tests/lm/test_sampling_kernels.py::"
FRAMES = "tests/target/test_frames.py::"
ROUNDS = "tests/router/test_rounds.py::"
BAD_ORDERS = "tests/target/test_bad_orders.py::"
DRAWING = "tests/draft/test_drawing.py::"
DRAFT_MODEL = "tests/draft/test_model.py::"
ROUTER_TEXT = "tests/router/test_text.py::"
STOPS = "tests/router/test_stop_strings.py::"
FAILOVER = (
    "tests/router/test_target_failures.py::"
    "test_text_goes_on_on_another_target_without_a_token_lost_or_told_twice"
)
ROUTER_GENERATE = "tests/router/test_generate.py::"
ORDERS = "tests/router/test_orders.py::"
ROUTER_REQUEST = "tests/router/test_request.py::"
ADMISSION = "tests/secure/test_admission.py::"
KEYS = "tests/secure/test_keys.py::"
HOSTILE = "tests/secure/test_hostile_draft.py::"
SLOW = "tests/secure/test_slow_clients.py::"


@dataclass(frozen=True)
class Edit:
    """One change: `old`, which stands in the file exactly once, becomes `new`."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """A mistake somebody could make.

    Attributes:
        name: what is wrong.
        edits: how it gets into the code.
        tests: node ids of the tests that should notice; run in this order until one fails.
    """

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


def one(name: str, path: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, (Edit(path, old, new),), tests)
