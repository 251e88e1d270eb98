"""The suffix drafter: looks up in the request's own text and in recent outputs of its kind."""

from __future__ import annotations

from draft_service.drafting import SequenceKey
from draft_service.lookup import LookupDrafter, LookupSequence
from draft_service.suffix_index import OutputMemory, SuffixIndex, SuffixOptions
from specdecode.types import OpenDraft


class SuffixSequence(LookupSequence):
    """A sequence whose output is remembered when it is closed, unless its request wants it forgotten."""

    def __init__(self, drafter: SuffixDrafter, key: SequenceKey, order: OpenDraft) -> None:
        self._memory = drafter.memory if order.remembers_output else None
        # Nobody drafts from what another tenant's requests put out: salts keep them apart.
        self._namespace = (order.cache_salt, order.traffic_class)
        self._num_prompt_tokens = order.num_prompt_tokens
        super().__init__(drafter, key, order, SuffixIndex(drafter.options, drafter.memory, self._namespace))

    def close(self) -> None:
        """Keeps what was put out."""
        super().close()
        if self._memory is not None:
            self._memory.remember(self._namespace, self.index.tokens[self._num_prompt_tokens :])


class SuffixDrafter(LookupDrafter):
    """Suffix look-up for many sequences (`specdecode.types.DrafterKind.SUFFIX`).

    Args:
        capacity: tokens of outputs that are remembered.
    """

    def __init__(self, options: SuffixOptions, capacity: int) -> None:
        super().__init__()
        self.options = options
        self.memory = OutputMemory(capacity)

    def start(self, key: SequenceKey, order: OpenDraft) -> SuffixSequence:
        """A sequence that looks up in the memory, too."""
        return SuffixSequence(self, key, order)
