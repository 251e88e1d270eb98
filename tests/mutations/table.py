"""All mutations."""

from __future__ import annotations

from tests.mutations import access, figures, http, kv, maths, services
from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *kv.rollback(),
    *kv.prefix_cache(),
    *kv.attention(),
    *kv.kernels(),
    *maths.verification(),
    *maths.sampling(),
    *maths.sampling_kernels(),
    *maths.noise(),
    *services.target(),
    *services.frames(),
    *services.foresight(),
    *services.drafter(),
    *services.suffix(),
    *services.router(),
    *access.access(),
    *figures.figures(),
    *figures.run_time_policy(),
    *http.http(),
)
