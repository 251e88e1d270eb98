"""`specdecode plan`: what speculation would bring, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecode.cli import show
from specdecode.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from specdecode.planner.plan import DraftOption, Row
    from specdecode.planner.request import PlanTexts

_PNG = "specdecode-plan.png"


def _option(text: str, default: str, metavar: str) -> Any:
    return typer.Option(help=text, metavar=metavar, show_default=default)


@dataclass(frozen=True)
class PlanFlags:
    """What is planned for, as texts."""

    alphas: Annotated[
        str | None,
        _option("Acceptance of each draft position, or one for all; 0 to 1", "0.8, assumed", "A,A,..."),
    ] = None
    draft_cost: Annotated[
        str | None, _option("Time of a draft pass over that of a plain step; above 0", "from --gpu", "NUMBER")
    ] = None
    target: Annotated[
        str | None,
        _option(
            "Target: a size (70B), a config.json or its directory; with --gpu this a measured model's name",
            "70B, or the newest measured",
            "MODEL",
        ),
    ] = None
    draft: Annotated[
        str | None,
        _option(
            "Draft: as --target; with --gpu this a drafter, ngram or model",
            "1B, or the first measured",
            "MODEL",
        ),
    ] = None
    drafts: Annotated[
        str | None, _option("Compare drafts: model and its acceptance", "none", "MODEL:A,...")
    ] = None
    gpu: Annotated[
        str | None,
        _option(
            "a100, h100, h100-nvl, h200, b200, l4, this, or a profile (.json, .yaml, .toml)", "h100", "GPU"
        ),
    ] = None
    calibration: Annotated[
        str | None, _option("File of measured costs, for --gpu this", "the newest kept", "PATH")
    ] = None
    tp: Annotated[str | None, _option("GPUs the target is cut over", "the fewest that fit", "INTEGER")] = None
    draft_tp: Annotated[str | None, _option("GPUs the draft is cut over", "the target's", "INTEGER")] = None
    dtype: Annotated[str | None, _option("Of the target's weights", "bf16", "DTYPE")] = None
    draft_dtype: Annotated[str | None, _option("Of the draft's weights", "bf16", "DTYPE")] = None
    kv_dtype: Annotated[str | None, _option("Of the KV cache", "bf16", "DTYPE")] = None
    context: Annotated[str | None, _option("Cached tokens of a sequence", "2000", "N,N,...")] = None
    batch: Annotated[
        str | None, _option("Sequences at once; a..b doubles from a to b", "1..256", "N,N,... or N..N")
    ] = None
    form: Annotated[
        str | None, _option("How memory and compute time make a step: sum or max", "sum", "FORM")
    ] = None
    max_draft_tokens: Annotated[
        str | None, _option("Largest γ", "8, or the number of --alphas", "INTEGER")
    ] = None
    fixed: Annotated[str | None, _option("Fixed γ to compare with", "1,2,3,5,7", "N,N,...")] = None
    idle_share: Annotated[
        str | None, _option("Share of drafting in which the target waits; 0 to 1", "1", "NUMBER")
    ] = None
    png: Annotated[str | None, _option("Picture to write; none for none", _PNG, "PATH")] = None


def plan(flags: PlanFlags) -> None:
    """Say from acceptance and costs how far to speculate, at which load it stops paying, and why.

    With --alphas and --draft-cost alone: expected tokens and speedup by γ. With a GPU or models: step times
    from a roofline, and throughput by batch for off, fixed γ and the policy that the router uses.
    """
    from specdecode.planner.request import PlanTexts

    given = vars(flags).copy()
    png = given.pop("png")
    texts = PlanTexts(**given)
    try:
        if texts.is_formula:
            _formula(texts)
        elif texts.drafts is not None:
            _compare(texts)
        else:
            _batches(texts, png)
    except InvalidArgumentError as error:
        raise typer.BadParameter(error.message) from None


def _formula(texts: PlanTexts) -> None:
    from specdecode.cost import best_row, speedup_table
    from specdecode.planner import tables

    if texts.alphas is None and texts.draft_cost is None:
        raise InvalidArgumentError.of(
            "plan", "give --alphas and --draft-cost, or a machine: --gpu, --target, --draft"
        )
    rows = speedup_table(texts.draft_alphas(), texts.cost())
    show.OUT.print(tables.speedups(rows))
    best = best_row(rows)
    if best is None:
        show.say("no γ is faster than decoding plainly")
        return
    shortest = next(row for row in rows if row.speedup >= 0.99 * best.speedup)
    text = f"best: γ = {best.num_draft_tokens}, {best.speedup:.2f} times as fast as decoding plainly"
    if shortest is not best:
        text += f"; γ = {shortest.num_draft_tokens} is within 1 % of it ({shortest.speedup:.2f})"
    show.say(text)


def _compare(texts: PlanTexts) -> None:
    from specdecode.planner import tables
    from specdecode.planner.plan import best_drafts

    options = texts.options()
    show.say("; ".join(option.system.title for option in options), "bold")
    for context in texts.contexts():
        rows = best_drafts(options, texts.batches(), context)
        show.say(f"tokens/s of the batch at context {context}, by draft")
        show.OUT.print(tables.drafts(options, rows))
        for option in options:
            _notes(option, context)


def _batches(texts: PlanTexts, png: str | None) -> None:
    from specdecode.planner import tables
    from specdecode.planner.explain import explain
    from specdecode.planner.plan import paying_range, plan_row
    from specdecode.planner.roofline import RooflineSystem

    (option,) = texts.options()
    places = [(batch, context) for context in texts.contexts() for batch in texts.batches()]
    rows = [plan_row(option.system, option.question, *place) for place in places]
    others, names = None, ("", "")
    if isinstance(option.system, RooflineSystem):
        other = option.system.other_form()
        others = [plan_row(other, option.question, *place) for place in places]
        names = (option.system.form.value, other.form.value)
    show.say(option.system.title, "bold")
    if texts.alphas is None:
        show.say(
            f"acceptance {texts.draft_alphas()[0]:g} at every position is assumed; --alphas says otherwise"
        )
    show.say("tokens/s of the batch")
    show.OUT.print(tables.throughputs(rows))
    show.say("the policy: step without drafts, its γ, gain over off, price; tokens/s of one user")
    show.OUT.print(tables.policies(rows, others, names))
    for context in texts.contexts():
        _notes(option, context)
    show.say(explain(option.system, option.question, rows))
    first = texts.contexts()[0]
    paying = paying_range(option.system, option.question, first)
    end = paying.break_even if paying else None
    _picture(png, rows, option.system.title, end, option.system.slots(first, with_draft=True))


def _notes(option: DraftOption, context: int) -> None:
    from specdecode.planner.plan import largest_batch, paying_range
    from specdecode.planner.roofline import RooflineSystem

    paying = paying_range(option.system, option.question, context)
    text = f"{option.name}, context {context}: drafting pays {paying.text if paying else 'at no batch'}"
    if paying and paying.break_even is None:
        text += f", no break-even up to batch {largest_batch(option.system, context)}"
    elif paying:
        text += f", break-even at {paying.break_even}"
    system = option.system
    if isinstance(system, RooflineSystem):
        slots = [system.slots(context, with_draft) for with_draft in (False, True)]
        first = [1e3 * system.prefill_seconds(context, with_draft) for with_draft in (False, True)]
        text += f"; KV slots {slots[0]}, {slots[1]} with the draft's weights and KV"
        text += f"; time to first token {first[0]:.0f} ms, {first[1]:.0f} ms with the draft's prefill"
    show.say(text)


def _picture(png: str | None, rows: Sequence[Row], title: str, end: int | None, slots: int | None) -> None:
    from specdecode.planner.picture import draw

    if png is not None and png.lower() == "none":
        return
    path = Path(png or _PNG)
    try:
        draw(rows, title, path, end, slots)
    except FailedPreconditionError as error:
        if png is not None:
            raise
        show.note(f"no picture: {error.message}")
        return
    except OSError as error:
        raise InvalidArgumentError.of("png", f"{path} can't be written: {error}") from error
    show.note(f"picture: {path}")
