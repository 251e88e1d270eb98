"""Mistakes in the HTTP front."""

from __future__ import annotations

from collections.abc import Iterator

from tests.mutations.mutation import Mutation, one

CLIENT = "tests/http/test_openai_client.py::"
STREAMS = "tests/http/test_streams.py::"
TOOLS = "tests/http/test_tools.py::"


def http() -> Iterator[Mutation]:
    yield one(
        "a client that leaves is not noticed",
        "router/http/responses.py",
        '        while (await self._receive())["type"] != "http.disconnect":\n            pass\n',
        "        await self._ending.wait()\n",
        f"{STREAMS}test_leaving_while_drafts_are_waited_for_frees_both_services",
    )
    yield one(
        "choices of the second prompt are taken for the first one's",
        "router/http/generation.py",
        "_run(router, request, index * request.resolved.n, traceparent)",
        "_run(router, request, index, traceparent)",
        f"{CLIENT}test_many_prompts_are_answered_in_their_order",
    )
    yield one(
        "the beginning of a call is said",
        "router/http/tools.py",
        "                safe = len(before) - _overlap(before, _OPEN)\n",
        "                safe = len(before)\n",
        f"{TOOLS}test_calls_are_found_however_the_text_is_cut",
    )
    yield one(
        "a prompt among many is looked at after others were started",
        "router/http/generation.py",
        "for entry in asked.requests]\n",
        "for entry in asked.requests[:1]]\n",
        f"{CLIENT}test_a_bad_prompt_among_many_stops_all_before_they_start",
        f"{CLIENT}test_many_prompts_are_answered_in_their_order",
    )
    yield one(
        "names of fields are sent back as they came",
        "router/http/front.py",
        'name if _FIELD.fullmatch(name) else "(another name)"',
        "name",
        f"{CLIENT}test_fields_that_nobody_knows_are_named_and_ignored",
    )
