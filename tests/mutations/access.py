"""Mistakes in who gets in, who waits and what tenants see of each other."""

from __future__ import annotations

from collections.abc import Iterator

from tests.mutations.mutation import ADMISSION, HOSTILE, KEYS, SLOW, Mutation, one


def access() -> Iterator[Mutation]:
    admission, keys = "router/admission.py", "specdecode/keys.py"
    yield one(
        "the turn is that of whoever was served most",
        admission,
        "line = min((line for",
        "line = max((line for",
        f"{ADMISSION}TestTurns::test_a_tenant_with_many_requests_does_not_delay_one_with_few",
    )
    yield one(
        "who comes back has saved up turns",
        admission,
        "            line.counter = max(line.counter, self._lowest_counter())\n",
        "            line.counter = max(line.counter, 0.0)\n",
        f"{ADMISSION}TestTurns::test_nobody_saves_up_turns_while_away",
    )
    yield one(
        "a request that has gone keeps its slot",
        admission,
        "            if turn.done() and not turn.cancelled():\n                self._end(line, ticket)",
        "            if turn.done() and turn.cancelled():\n                self._end(line, ticket)",
        f"{ADMISSION}TestQueue::test_whoever_gives_up_leaves_no_place_taken",
    )
    yield one(
        "any secret of a known id gets in",
        keys,
        '    return entry if entry.matches(match["secret"]) else None\n',
        "    return entry if entry.id else None\n",
        f"{KEYS}TestFile::test_only_the_whole_key_is_known",
    )
    yield one(
        "tenants share their caches",
        "router/router.py",
        "        return replace(resolved, cache_salt=caller.salt(resolved.cache_salt))\n",
        "        return resolved\n",
        f"{KEYS}TestTenants::test_no_tenant_finds_what_anothers_prompts_left_in_the_prefix_cache",
    )
    yield one(
        "the router believes every draft",
        "router/rounds.py",
        "        self._orders.opens.append(_open_order(seat, self._drafts.is_trusted))\n",
        "        self._orders.opens.append(_open_order(seat, True))\n",
        f"{HOSTILE}test_a_lie_about_q_changes_no_distribution_where_drafts_are_not_trusted",
    )
    yield one(
        "a text that waits for its client is never taken up again",
        "router/rounds.py",
        "            self._parked.remove(choice)\n            self._place_elsewhere(choice)\n",
        "            self._parked.remove(choice)\n",
        f"{SLOW}test_a_text_nobody_reads_gives_its_kv_back_and_goes_on_unchanged_once_it_is_read",
    )
