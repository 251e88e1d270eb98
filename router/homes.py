"""Which replica each request is given to, and what is remembered for the next ones."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from router.placement import Demand, Standing, place
from router.prefixes import prefix_digests
from router.request import Choice
from router.rounds import ReplicaLoop
from specdecode.lm.pool import Digest

_MAX_CONVERSATIONS = 10_000
_EXPECTED_OUTPUT_TOKENS = 128
"""Of requests that may emit more: few use all that they may."""


class Homes:
    """Chooses replicas; remembers what it sent where, and where conversations were."""

    def __init__(self) -> None:
        self._conversations: OrderedDict[tuple[bytes, str], ReplicaLoop] = OrderedDict()
        self._random = random.Random()

    def choose(
        self, choices: Sequence[Choice], usable: Sequence[ReplicaLoop], homes: Iterable[ReplicaLoop]
    ) -> ReplicaLoop | None:
        """The replica for choices of one prompt; None if none is usable.

        Args:
            homes: replica of each choice that runs.
        """
        if len(usable) < 2:
            return usable[0] if usable else None
        first, counts = choices[0], Counter(homes)
        digests = [self._digests(first, loop) for loop in usable]
        standings = [_standing(loop, counts[loop], own) for loop, own in zip(usable, digests, strict=True)]
        remaining = min(first.num_remaining, _EXPECTED_OUTPUT_TOKENS)
        demand = Demand(len(first.tokens), remaining, len(choices))
        index = place(demand, standings, self._home(first, usable), self._random)
        if index is None:
            return None
        chosen = usable[index]
        chosen.prefixes.add(digests[index])
        missing = max(len(first.tokens) - standings[index].cached_tokens, 0)
        chosen.coming.update(dict.fromkeys(choices, missing // len(choices)))
        self._remember(first, chosen)
        return chosen

    def ended(self, choice: Choice, loop: ReplicaLoop) -> None:
        """What a choice emitted is in its replica's prefix cache."""
        if choice.num_output and len(loop.prefixes):
            loop.prefixes.add(self._digests(choice, loop))

    def _digests(self, choice: Choice, loop: ReplicaLoop) -> list[Digest]:
        size = 0 if loop.link.info is None else loop.link.info.block_size
        return prefix_digests(choice.tokens, size, choice.resolved.cache_salt) if size else []

    def _home(self, choice: Choice, usable: Sequence[ReplicaLoop]) -> int | None:
        loop = self._conversations.get(_conversation(choice))
        return usable.index(loop) if loop is not None and loop in usable else None

    def _remember(self, choice: Choice, loop: ReplicaLoop) -> None:
        if not choice.resolved.conversation:
            return
        key = _conversation(choice)
        self._conversations[key] = loop
        self._conversations.move_to_end(key)
        while len(self._conversations) > _MAX_CONVERSATIONS:
            self._conversations.popitem(last=False)


def _conversation(choice: Choice) -> tuple[bytes, str]:
    """Names of one salt are not those of another."""
    return choice.resolved.cache_salt, choice.resolved.conversation


def _standing(loop: ReplicaLoop, num_choices: int, digests: Sequence[Digest]) -> Standing:
    link = loop.link
    size = 0 if link.info is None else link.info.block_size
    return Standing(
        load=link.load,
        costs=link.costs,
        num_choices=num_choices,
        unseen_tokens=sum(loop.coming.values()),
        cached_tokens=loop.prefixes.num_known(digests) * size,
    )
