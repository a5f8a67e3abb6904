"""The text of a claim, and of one that was checked: for a terminal, a pull request, a program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from ppbench.cli.comparison import as_code, details
from ppbench.commits.claim_check import Judged, Recheck
from ppbench.commits.claim_file import write_claim
from ppbench.commits.claims import (
    Case,
    Claim,
    Discounted,
    Effect,
    Launch,
    Side,
    estimate_of,
    replications_of,
)
from ppbench.comparison.notes import ON_ONE_SESSION
from ppbench.comparison.sessions import BREAK
from ppbench.display.changes import change_text, figure_text, verdict_text
from ppbench.display.claims import claim_words, detectable_words
from ppbench.display.fields import Field, field_of, words
from ppbench.display.formats import Format
from ppbench.display.metrics import METRICS
from ppbench.display.tables import EVERYTHING, View, render
from ppbench.display.units import counted
from ppbench.files import whole_file
from ppbench.statistics.replication import Outcome
from ppbench.statistics.verdicts import Verdict

JSON = ".json"
_MOST_NAMED = 3
_REASONS = {
    "apart": "it lies far from the others of its side, on the slow side",
    "reference": "the fixed work beside it was slow, so its machine was disturbed",
}


def write_claims(claim: Claim, files: Iterable[Path]) -> None:
    """Write a claim as the files' endings say: in JSON, or as a page. Raises StoreError."""
    for file in files:
        if file.suffix == JSON:
            write_claim(claim, file)
        else:
            with whole_file(file, "--claim") as page:
                page.write(f"{claim_page(claim)}\n".encode())


def claim_page(claim: Claim) -> str:
    """A claim as markdown, for a pull request."""
    parts = [
        f"**{_code_free(headline(claim))}**",
        f"- base {as_code(_side_text(claim.base))}\n- head {as_code(_side_text(claim.head))}",
        _effects_table(claim),
        "\n".join(f"- {_code_free(line)}" for line in _qualifications(claim)),
        details(f"{counted(len(claim.launches), 'launch')}, machine and settings", _body(claim)),
        f"To repeat it:\n\n```sh\n{claim.command}\n```",
    ]
    return "\n\n".join(part for part in parts if part)


def headline(claim: Claim) -> str:
    """The claim in one sentence."""
    shown = claim.claimed or list(claim.effects[:1])
    if not shown:
        return "not shown: no case was measured on both sides on the same machine"
    sentences = [f"{_subject(claim, effect)}: {_words(effect)}" for effect in shown[:_MOST_NAMED]]
    more = f"; and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    return f"{'; '.join(sentences)}{more}; {rests_on(claim)}"


def rests_on(claim: Claim) -> str:
    """How many sessions a claim rests on, and whether later ones repeat what the first showed."""
    numbers = {one.session for effect in claim.claimed for one in effect.sessions}
    if not numbers:
        return "base and head were never measured in one session"
    if len(numbers) == 1:
        return "rests on one session"
    outcomes = [outcome for effect in claim.claimed for _, outcome, _ in replications_of(effect)]
    if not outcomes or not all(outcome is Outcome.held for outcome in outcomes):
        worst = Outcome.contradicted if Outcome.contradicted in outcomes else Outcome.not_shown
        return f"{len(numbers)} sessions, {worst} in one of the later ones"
    return f"held in {counted(len(numbers), 'session')}"


def _words(effect: Effect) -> str:
    metric = METRICS[effect.metric]
    return claim_words(metric, effect.change.as_change(metric), effect.detectable)


def _subject(claim: Claim, effect: Effect) -> str:
    label = field_of(effect.metric).label
    return f"{label} of {claim.cases[effect.case].text}"


def _side_text(side: Side) -> str:
    known = [side.commit or side.name, side.subject or ""]
    dirty = f"with uncommitted changes {side.changes}" if side.is_dirty else ""
    return " ".join(part for part in [*known, dirty] if part)


def _effects_table(claim: Claim) -> str:
    rows = []
    for effect in claim.effects:
        metric = METRICS[effect.metric]
        change = effect.change.as_change(metric)
        rows.append(
            {
                "case": claim.cases[effect.case].text,
                "figure": field_of(effect.metric).heading,
                "base": figure_text(metric, change.base),
                "head": figure_text(metric, change.head),
                "change_text": change_text(metric, change),
                "verdict": verdict_text(metric, change.verdict),
                "launches": f"{change.num_base}, {change.num_head}",
            }
        )
    return render(pd.DataFrame(rows), Format.markdown, list(rows[0])) if rows else ""


def _qualifications(claim: Claim) -> Iterable[str]:
    """What was detectable, what counts for less, what other sessions say."""
    for effect in claim.claimed:
        metric, subject = METRICS[effect.metric], _subject(claim, effect)
        change = effect.change.as_change(metric)
        if effect.detectable is not None:
            yield f"{subject}: {detectable_words(metric, change, effect.detectable)}"
        for number, outcome, again in replications_of(effect):
            begin = claim.sessions[number].begin[:10]
            yield f"{subject}: {outcome} in the session of {begin}: {claim_words(metric, again)}"
    for effect in claim.effects:
        for one in effect.discounts:
            yield f"{_subject(claim, effect)}: {_discount_text(one)}"
    dirty = [word for word, side in (("base", claim.base), ("head", claim.head)) if side.is_dirty]
    if dirty:
        yield f"{' and '.join(dirty)} had uncommitted changes, which no commit has"


def _discount_text(one: Discounted) -> str:
    counts = f"counts for {one.weight:.2g} of one" if one.weight else "does not count"
    why = _REASONS.get(one.reason, one.reason)
    return f"launch {one.run_id} of {one.side} {counts}: {why}"


def _body(claim: Claim) -> str:
    return "\n\n".join(
        [
            _launches_table(claim),
            *(_machine_text(claim, place) for place in range(len(claim.machines))),
            *(f"{as_code(case.text)}: {as_code(_settings_text(case))}" for case in claim.cases),
            "Measured by code "
            + "; ".join(
                f"{as_code(', '.join((*side.code, *side.runtime_code)) or 'unknown')} at {word}"
                for word, side in (("base", claim.base), ("head", claim.head))
            )
            + f". Claimed on {claim.made_at[:10]} with ppbench {claim.ppbench_version}.",
        ]
    )


def _settings_text(case: Case) -> str:
    settings = {**case.settings, **case.measure}
    known = {name: value for name, value in settings.items() if value not in (None, "", "[]")}
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in known.items())


def _machine_text(claim: Claim, place: int) -> str:
    machine = claim.machines[place]
    facts = {name: value for name, value in machine.facts.items() if name != "hostname" and value}
    text = ", ".join(f"{name} {json.dumps(value)}" for name, value in facts.items())
    return f"Machine {as_code(machine.fingerprint)}: {as_code(text or 'unknown')}"


def _launches_table(claim: Claim) -> str:
    metrics = list(dict.fromkeys(effect.metric for effect in claim.effects))
    has_several = len(claim.cases) > 1
    known = (name for one in claim.launches for name, v in one.controls.items() if v is not None)
    controls = list(dict.fromkeys(known))
    rows = [
        {
            **({"case": claim.cases[launch.case].text} if has_several else {}),
            "side": launch.side,
            "run_id": launch.run_id,
            "ended_at": _time(launch),
            "session": str(launch.session + 1) if launch.session >= 0 else "unknown",
            **{name: _figure(launch, name) for name in metrics},
            **{name: _control(launch, name) for name in controls},
            "cautions": ", ".join(launch.cautions) if launch.status == "ok" else launch.status,
        }
        for launch in claim.launches
    ]
    if not rows:
        return ""
    fields = {name: words(name.replace("_", " ")) for name in rows[0]}
    recorded = {name: words(field_of(name).heading) for name in controls}
    figures = {name: words(field_of(name).heading, is_number=True) for name in metrics}
    return render(pd.DataFrame(rows), Format.markdown, {**fields, **recorded, **figures})


def _control(launch: Launch, name: str) -> str:
    value = launch.controls.get(name)
    return "" if value is None else field_of(name).cell(value)


def _figure(launch: Launch, name: str) -> str:
    return figure_text(METRICS[name], launch.figures.get(name))


def _time(launch: Launch) -> str:
    return "unknown" if launch.ended_at is None else launch.ended_at[:19].replace("T", " ")


def _code_free(text: str) -> str:
    """A sentence with foreign words in it, harmless as markdown."""
    from ppbench.display.tables import escaped

    return escaped(" ".join(text.split()))


def recheck_text(recheck: Recheck, how: Format, view: View = EVERYTHING) -> str:
    """The output of `ppbench check CLAIM` and of `compare --replicate`."""
    rows = [_recheck_row(one) for one in recheck.judged]
    frame = pd.DataFrame([_raw_row(one) for one in recheck.judged])
    if how is Format.csv:
        return render(frame, how, [], view)
    if how is Format.json:
        return json.dumps(_recheck_values(recheck), indent=2, allow_nan=False)
    is_page = how is Format.markdown
    first = recheck_headline(recheck)
    lines = [_timing(recheck)]
    lines += [f"note: {text}" for text in _notes_of(recheck)]
    parts = [
        f"**{_code_free(first)}**" if is_page else first,
        "\n".join(f"- {_code_free(line)}" if is_page else line for line in lines[:1]),
        _recheck_table(rows, how, view),
        "\n".join(f"- {_code_free(line)}" if is_page else line for line in lines[1:]),
    ]
    return "\n\n".join(part for part in parts if part)


def _notes_of(recheck: Recheck) -> list[str]:
    """All notes but that on the sessions, which has a line of its own."""
    others = recheck.comparison.notes
    return [*recheck.notes, *(note for note in others if not note.startswith(ON_ONE_SESSION))]


def recheck_headline(recheck: Recheck) -> str:
    """What measuring again says, in one sentence, with the figures of both."""
    if not recheck.judged:
        return f"{Outcome.not_shown}: the claim shows nothing that could hold"
    same = [one for one in recheck.judged if one.outcome is recheck.outcome]
    sentences = [_sentence(recheck.claim, one) for one in same[:_MOST_NAMED]]
    more = f"; and {len(same) - _MOST_NAMED} more" if len(same) > _MOST_NAMED else ""
    return f"{recheck.outcome}: {'; '.join(sentences)}{more}"


def _sentence(claim: Claim, one: Judged) -> str:
    subject = _subject(claim, one.effect)
    return f"{subject}: {_again_words(one)}; claimed: {_words(one.effect)}"


def _again_words(one: Judged) -> str:
    if one.again is None:
        return "not measured again"
    return claim_words(one.again.metric, one.again.change)


def _timing(recheck: Recheck) -> str:
    """When it was measured again, and whether that was another session."""
    when = ", ".join(map(str, recheck.sessions)) or "unknown"
    if recheck.begun is not None:
        return f"again    {when}: another session, begun on purpose at {recheck.begun:%H:%M} UTC"
    if recheck.is_another_session:
        return f"again    {when}: another session"
    hours = BREAK.total_seconds() / 3600
    return (
        f"again    {when}: the claim's own session: it repeats there, and may not on another day; "
        f"after a break of {hours:.0f} hours: --replicate"
    )


_HEADED: dict[str, Field] = {
    "case": field_of("case"),
    "figure": field_of("figure"),
    "claimed": words("claimed"),
    "again": words("again"),
    "launches": field_of("launches"),
    "outcome": words("outcome"),
}


def _recheck_table(rows: Sequence[dict[str, str]], how: Format, view: View) -> str:
    """A row for each claim; a case that is the only one stands in the sentence above."""
    if not rows:
        return ""
    frame = pd.DataFrame(rows)
    hidden = {"case"} if len(set(frame["case"])) == 1 else set()
    shown = {name: field for name, field in _HEADED.items() if name not in hidden}
    return render(frame, how, shown, view, ["figure", "outcome"])


def _recheck_row(one: Judged) -> dict[str, str]:
    metric = METRICS[one.effect.metric]
    change = None if one.again is None else one.again.change
    return {
        "case": one.case.text,
        "figure": field_of(metric.name).heading,
        "claimed": change_text(metric, one.effect.change.as_change(metric)),
        "again": "–" if change is None else change_text(metric, change),
        "launches": "–" if change is None else f"{change.num_base}, {change.num_head}",
        "outcome": str(one.outcome),
    }


def _raw_row(one: Judged) -> dict[str, object]:
    metric = METRICS[one.effect.metric]
    again = None if one.again is None else estimate_of(metric, one.again.change)
    names = ("verdict", "estimate", "low", "high", "num_base", "num_head")
    return {
        "case_id": one.case.case_id,
        "case": one.case.text,
        "metric": metric.name,
        **{f"claimed_{name}": _plain(getattr(one.effect.change, name)) for name in names},
        **{
            f"again_{name}": None if again is None else _plain(getattr(again, name))
            for name in names
        },
        "outcome": str(one.outcome),
    }


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Verdict) else value


def _recheck_values(recheck: Recheck) -> dict[str, object]:
    return {
        "outcome": str(recheck.outcome),
        "exit_code": recheck.exit_code,
        "is_another_session": recheck.is_another_session,
        "sessions": [str(session) for session in recheck.sessions],
        "claims": [_raw_row(one) for one in recheck.judged],
        "notes": _notes_of(recheck),
    }


def side_names(sides: Sequence[Side]) -> list[str]:
    """The sides as a command names them that repeats the comparison: full hashes."""
    return [side.revision or side.name for side in sides]
