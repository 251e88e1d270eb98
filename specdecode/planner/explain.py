"""Where speculation stops paying, and why, in two sentences."""

from __future__ import annotations

from collections.abc import Sequence

from specdecode.planner.plan import (
    PayingRange,
    Question,
    Row,
    System,
    fixed_speed,
    largest_batch,
    paying_range,
    running,
)


def explain(system: System, question: Question, rows: Sequence[Row]) -> str:
    """Along the contexts at the largest batch if there are several, else along the batches."""
    contexts = sorted({row.context for row in rows})
    if len(contexts) > 1:
        largest = max(row.batch for row in rows)
        return _along_contexts(system, [row for row in rows if row.batch == largest])
    paying = paying_range(system, question, contexts[0])
    if paying is None:
        return _nowhere(system, question, contexts[0])
    if paying.break_even is None:
        return _everywhere(system, question, contexts[0], paying)
    if running(system, paying.break_even, contexts[0], with_draft=True) < paying.break_even:
        return _out_of_room(system, question, contexts[0], paying, paying.break_even)
    return _up_to(system, question, contexts[0], paying, paying.break_even)


def _along_contexts(system: System, rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    length, _ = last.best_fixed
    ends = (first, last)
    changes = [row.change(row.fixed[length]) for row in ends]
    kv = [_kv_share(system, row) for row in ends]
    added = [row.fixed[length].seconds - row.off.seconds for row in ends]
    shares = [seconds / row.off.seconds for seconds, row in zip(added, ends, strict=True)]
    brings = first.fixed[length].emitted / first.fixed[length].running - 1
    return (
        f"At batch {first.batch} and γ = {length} throughput changes by {changes[0]:+.0%} at context "
        f"{first.context} and by {changes[1]:+.0%} at context {last.context}, and KV reads are the cause: "
        f"they grow from {kv[0]:.0%} to {kv[1]:.0%} of a plain step, and one read serves all "
        f"{length + 1} tokens of a sequence. "
        f"Drafting and verifying adds {1e3 * added[0]:.1f} ms to a round at the shorter context and "
        f"{1e3 * added[1]:.1f} ms at the longer one, {shares[0]:.0%} and {shares[1]:.0%} of a plain step, "
        f"and pays where that is less than the {brings:.0%} more tokens it brings."
    )


def _up_to(system: System, question: Question, context: int, paying: PayingRange, end: int) -> str:
    parts = system.parts(end, end, context)
    ridge = system.steps(end, context, 1).ridge
    off = fixed_speed(system, question, end, context, 0)
    first = fixed_speed(system, question, end, context, 1)
    added = first.seconds - off.seconds
    drafting = question.idle_share * system.drafts(end, context).round([1] * end, [context] * end)
    return (
        f"Drafting pays {paying.text}: a step takes {1e3 * parts.fixed:.1f} ms whatever is in flight "
        f"(and {1e3 * parts.kv:.1f} ms for the KV of that batch), beside which drafted tokens are cheap "
        f"while fewer than about {ridge:.0f} tokens are in flight. "
        f"At batch {end} one draft for each sequence adds {1e3 * added:.1f} ms to a round "
        f"({1e3 * drafting:.1f} ms drafting, the rest verifying), {added / off.seconds:.0%} of a plain step, "
        f"and brings {question.survivals[0]:.0%} more tokens{_too_few(system, question, context, paying)}."
    )


def _out_of_room(system: System, question: Question, context: int, paying: PayingRange, end: int) -> str:
    room = running(system, end, context, with_draft=True)
    speeds = [fixed_speed(system, question, room, context, n) for n in range(len(question.survivals) + 1)]
    best = max(speeds[1:], key=lambda speed: speed.throughput)
    gain = best.throughput / speeds[0].throughput - 1
    return (
        f"Drafting pays {paying.text}: the draft's weights and KV leave room for {room} sequences of "
        f"{context} tokens, and a batch of {end} without a draft emits more than those {room} with one. "
        f"The step itself is not what stops it: at {room} sequences drafting (γ = "
        f"{best.num_draft_tokens:.0f}) still changes throughput by {gain:+.0%}"
        f"{_too_few(system, question, context, paying)}."
    )


def _everywhere(system: System, question: Question, context: int, paying: PayingRange) -> str:
    batch = largest_batch(system, context)
    parts = system.parts(batch, batch, context)
    off = fixed_speed(system, question, batch, context, 0)
    why = "room in the KV cache" if system.slots(context, with_draft=False) else "the range looked at"
    return (
        f"Drafting pays {paying.text} up to {batch}, where {why} ends. "
        f"Even there {parts.fixed / off.seconds:.0%} of a plain step do not depend on the tokens in flight "
        f"and {parts.kv / off.seconds:.0%} are KV reads that serve drafted tokens for nothing, so the "
        f"{parts.compute / off.seconds:.0%} that are compute are too few to stop it"
        f"{_too_few(system, question, context, paying)}."
    )


def _too_few(system: System, question: Question, context: int, paying: PayingRange) -> str:
    """Why drafting does not pay below the first batch, as the end of a sentence."""
    if paying.first == 1:
        return ""
    off = fixed_speed(system, question, 1, context, 0)
    added = fixed_speed(system, question, 1, context, 1).seconds - off.seconds
    return (
        f", while for one sequence a plain step is so short ({1e3 * off.seconds:.1f} ms) that one draft adds "
        f"{added / off.seconds:.0%} to it"
    )


def _nowhere(system: System, question: Question, context: int) -> str:
    off = fixed_speed(system, question, 1, context, 0)
    added = fixed_speed(system, question, 1, context, 1).seconds - off.seconds
    return (
        f"Drafting pays at no batch: already for a single sequence one draft adds "
        f"{added / off.seconds:.0%} of a plain step to a round and brings "
        f"{question.survivals[0]:.0%} more tokens. "
        f"The draft is too slow or too rarely right for this target; load has no part in it."
    )


def _kv_share(system: System, row: Row) -> float:
    return system.parts(row.off.running, row.off.running, row.context).kv / row.off.seconds
