"""The conclusions of a report in words: one graded sentence, three figures, and what follows.

They derive from one judgement (`ppbench.report.pages.judgement`). Only a decided case is called the
fastest; without that, the sentence says why and what to do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import pandas as pd
from markupsafe import Markup

from ppbench.cautions import Caution
from ppbench.comparison.axes import key_of
from ppbench.comparison.sentences import sentences
from ppbench.display.cases import ok_runs
from ppbench.display.document import Block, Code, Picture, Result, Section, Text, of_page
from ppbench.display.fields import figure
from ppbench.display.markup import fragment
from ppbench.display.units import (
    comparison,
    counted,
    is_missing,
    percent,
    rounded_size,
    size,
    written,
)
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.evidence import RESOLUTION
from ppbench.judge.verdicts import Change, Verdict
from ppbench.report.charts.pareto import pareto_front
from ppbench.report.pages.advice import advice, more_launches
from ppbench.report.pages.judgement import (
    LEAST_SAVED,
    ROUNDED,
    Judged,
    Judgement,
    Saving,
)

MOST_SMALLER = 4  # cases along the front
MOST_NAMED = 4  # cases by name
NOTHING_COMPARABLE = "nothing to compare"

OPEN, DECIDED = "open", "decided"
_GRADED = """\
<strong class="grade {{ grade | replace(" ", "-") }}">{{ grade | capitalize }}.</strong> \
{{ where }}{{ verb }}{% if name %}<strong>{{ name }}</strong>{% endif %}\
{{ rest | replace(" %", "\u00a0%") }}"""
_TILES = """\
<dl class="tiles">
{% for tile in tiles %}<div class="tile"><dt>{{ tile.name }}</dt>
<dd><span class="value">{{ tile.value | replace(" %", "\u00a0%") }}</span>\
{% if tile.detail %} <span class="note">{{ tile.detail | replace(" %", "\u00a0%") }}</span>\
{% endif %}{% if tile.rival %}
<span class="rival">{{ tile.rival | replace(" %", "\u00a0%") }}</span>{% endif %}</dd></div>
{% endfor %}</dl>"""
_GRADES = (
    "figures are medians over launches. Decided means: no other case can be faster by more than "
    f"{RESOLUTION:.0%}".replace("%", " %")
    + ", which is wrong in at most 1 % of reports, and no caution forbids a verdict."
)
_WHY = {
    Caution.oversubscribed.name: "ranks shared cores",
    Caution.time_sliced.name: "ranks shared a GPU",
    Caution.throttled.name: "the processor was throttled",
    Caution.busy_machine.name: "other processes kept the machine busy",
    Caution.unsettled_steps.name: "steps were still getting faster",
    Caution.behind_plan.name: "emulated steps took longer than planned",
    Caution.noisy_steps.name: "step times vary by more than 10 %",
    Caution.few_steps.name: "fewer than 3 steps were measured",
    Caution.no_warmup.name: "the first measured step was the first of all",
}


@dataclass(frozen=True)
class Sentence:
    """The answer: how sure it is, in what setting, which case, and the rest; plain text."""

    grade: str  # `decided`, `open` or `nothing to compare`
    where: str  # `With 2 ranks, 128 tokens: `, or empty
    name: str
    rest: str
    advice: str  # what to do where it is open, or empty
    command: str  # that does it, or empty
    verb: str = ""  # before the name: `Use `, or empty
    case_id: str = ""  # of the case to take; empty where that is open

    @property
    def text(self) -> str:
        grade = "" if self.verb else f"{self.grade.capitalize()}. "  # an instruction comes first
        return f"{grade}{self.where}{self.verb}{self.name}{self.rest}"

    @property
    def html(self) -> Markup:
        return Markup(fragment(_GRADED, **vars(self)))  # noqa: S704 - escaped by the template


@dataclass(frozen=True)
class Tile:
    """A figure of the best case, and the same of its rival."""

    name: str
    value: str
    detail: str
    rival: str


@dataclass(frozen=True)
class Conclusions:
    """All that a report says about its figures: a block of a document, which says the answers."""

    sentence: Sentence
    tiles: tuple[Tile, ...]
    notes: tuple[str, ...]  # what the answer counts and what it does not
    smaller: tuple[str, ...]  # cases that need less memory
    others: tuple[Sentence, ...]  # the answers of other groups

    @property
    def answers(self) -> list[str]:
        """Which case to take, what would decide what is open, and the answers of other groups."""
        said = self.sentence
        texts = [said.text, said.advice, said.command, *(other.text for other in self.others)]
        return [text for text in texts if text]

    def terminal(self) -> str:
        return Text(self.answers).terminal()

    def markdown(self) -> str:
        return Text(self.answers).markdown()

    def html(self) -> str:
        said = self.sentence
        blocks: list[Block] = [of_page('<p class="lead">{{ text }}</p>', text=said.html)]
        if said.advice:
            command = [Code(said.command)] if said.command else []
            blocks.append(Section("", "", [Text(said.advice), *command], kind="advice"))
        blocks += [tiled(self.tiles)] if self.tiles else []
        return Result([*blocks, *(Text(one.text) for one in self.others)]).html()


def tiled(tiles: Sequence[Tile]) -> Picture:
    """Figures beside each other, each above its rival's."""
    return of_page(_TILES, tiles=tiles)


def conclude(judged: Judged, runs: pd.DataFrame, command: str = "") -> Conclusions:
    """Put judgements into words; `runs` are those that they are about.

    A sweep of several groups is answered as a whole, if all of them ask for the same axis.

    `command` is the one that measured them, for the advice; empty where it is not known.
    """
    left_out = []
    if num := len(judged.not_finite):
        names = f" ({'; '.join(judged.not_finite['text'])})" if num <= MOST_NAMED else ""
        left_out.append(
            f"Left out: {counted(num, 'case')} in which a loss or gradient was NaN or "
            f"infinite{names}, so that the speed means nothing."
        )
    if judged.num_emulated:
        left_out.append(
            f"Judged on their own: {counted(judged.num_emulated, 'emulated case')}, as they "
            "compute nothing and others do."
        )
    first = judged.first
    if first is None:
        if len(judged.not_finite):
            why = "Every loss or gradient was NaN or infinite, so that the speed means nothing."
        elif ok_runs(runs).empty:
            why = "No run succeeded; the errors are listed below."
        else:
            why = "No run has a stored throughput."
        nothing = Sentence(NOTHING_COMPARABLE, "", "", why, "", "")
        return Conclusions(nothing, (), tuple(left_out), (), ())
    # What the sentence compares.
    if len(first.cases) > 1:
        common = f", all with {first.where}" if first.where else ""
        words = [axis.removeprefix("model_").replace("_", " ") for axis in first.axes]
        axes = " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
        numbers = sorted({int(num) for num in first.cases["num_launches"]})
        each = " to ".join(str(num) for num in dict.fromkeys((numbers[0], numbers[-1])))
        compared_cases = f"{len(first.cases)} cases that do the same work{common}"
        notes = [
            f"The answer compares {compared_cases}. They differ in {axes}.",
            f"Each case has {each} {'launch' if each == '1' else 'launches'}; {_GRADES}",
        ]
        if first.num_left_out:
            left = counted(first.num_left_out, "oversubscribed case")
            notes.append(f"Left out: {left}, in which ranks shared cores.")
        if not _were_alive_together(runs):
            notes.append(
                "Memory does not hold all cases at once: they took turns in groups that share one "
                "case. Cases of different groups are compared by launches, not round by round."
            )
    elif len(judged.cases) > 1 and judged.along:
        notes = ["No two cases do the same work, so that none is the best of them."]
    elif len(judged.cases) > 1:
        notes = ["No two cases do the same work, so their throughputs do not compare."]
    else:
        notes = ["There is only one case."]
    others = [judgement for judgement in judged.judgements[1:] if judgement.lead is not None]
    if judged.whole is not None:
        others = [first, *others]
        notes.insert(
            0,
            f"The answer is the mean{judged.whole.over}, in which cases differ in their "
            f"{judged.whole.axes[0]} alone. Below it, {first.where or 'one of them'} is shown.",
        )
    along = _along(judged, runs, command)
    return Conclusions(
        along or sentence(judged.whole or first, runs, command),
        () if along else tuple(tiles(first)),
        (*notes, *left_out),
        tuple(_under_memory(first)),
        tuple(sentence(judgement, runs, command) for judgement in others),
    )


def _along(judged: Judged, runs: pd.DataFrame, command: str) -> Sentence | None:
    """Say what each axis changes; None where launches are too few for any interval."""
    changes = [line.change for one in judged.along for line in one.lines]
    if not any(change.has_interval for change in changes):
        return None
    told = []
    for one in judged.along:
        said = [text.removeprefix("Open: ") for text in sentences(one)]
        told += said[:MOST_NAMED]
        if (more := len(said) - MOST_NAMED) > 0:
            told.append(f"And {more} more along {key_of(one.axis)}.")
    is_decided = all(change.is_decided for change in changes)
    grade = DECIDED if is_decided else OPEN
    return Sentence(grade, "", "", " ".join(told), *more_launches(changes, runs, command))


def _were_alive_together(runs: pd.DataFrame) -> bool:
    """Whether all cases of a start had turns in the same rounds, as far as rounds are stored."""
    if "rounds" not in runs or "process_start" not in runs:
        return True
    known = runs.dropna(subset=["rounds", "process_start"])
    rounds = known["rounds"].map(lambda text: set(json.loads(text)["round"]))
    return all(
        one & other
        for _, own in rounds.groupby(known["process_start"])
        for one, other in combinations(own, 2)
    )


def sentence(judgement: Judgement, runs: pd.DataFrame, command: str = "") -> Sentence:
    """Say which one to take and why, or what is known so far and what would decide it."""
    where, over = f"With {judgement.where}: " if judgement.where else "", judgement.over
    speed = figure("tokens_per_s", judgement.best["tokens_per_s"])
    names, change, rival = judgement.names, judgement.to_rival, judgement.rival
    if rival is None:
        return Sentence(NOTHING_COMPARABLE, "", names[0], f" reaches {speed}.", "", "")
    name, other, by = names[0], names[judgement.rival_place], _interval(change)
    saved, verb = judgement.saving, "use " if where else "Use "
    end = f" {name if saved.is_first else other} needs {_less(saved)}." if saved else ""
    end += judgement.unless
    ids = [""] * len(names) if over else judgement.arms  # several cases have a value
    if judgement.is_decided and change is not None:
        how = ":" if over else f": {speed},"
        if change.verdict is Verdict.faster:
            rest = f"{how} faster than {other}{over} ({by}).{end}"
        else:
            same = dict.fromkeys([judgement.rival_place, *judgement.places(Verdict.same)])
            as_fast = [names[place] for place in same]
            beside = f" ({by})" if len(as_fast) == 1 else ""
            least = "" if change.verdict is Verdict.same else "at least "
            listed = _or(as_fast[:MOST_NAMED], "and")
            rest = f"{how} {least}as fast as {listed}{over}{beside}.{end}"
        return Sentence(DECIDED, where, name, rest, "", "", verb, ids[0])
    why, advised = _why(judgement), advice(judgement, runs, command)
    if saved and change and len(names) == 2 and not judgement.cautions:
        small = 0 if saved.is_first else 1
        if text := _for_memory(names[1 - small], saved, change, why):
            rest = f"{text}{judgement.unless}"
            return Sentence(OPEN, where, names[small], rest, *advised, verb, ids[small])
    # What is known: which may be the best, and which are slower than the first of them.
    maybe = [0, *judgement.places(Verdict.open), *judgement.places(Verdict.same)]
    clauses, beaten = [], judgement.places(Verdict.faster)
    for place in beaten[:1]:
        lead_over = judgement.change(0, place)
        if lead_over is not None and lead_over.ratio is not None:
            percent_more = written(lead_over.ratio.estimate - 1, ".1f", "%", 100)
            clauses.append(f"{name} beats {names[place]} by {percent_more}")
    if change is not None and change.has_interval and not change.verdict.is_claim:
        of_means = "on average over launches, " if change.shown_otherwise else ""
        clauses.append(f"{of_means}{name} and {other} differ by {by} (at 95 %)")
    known = f"; {'; '.join(clauses)}" if clauses else ""
    rest = f"{known}{over}, but {why}.{end}"
    if over or (len(maybe) <= MOST_NAMED and beaten):
        named = _or([names[place] for place in maybe[:MOST_NAMED]], "or")
        return Sentence(OPEN, where, named, rest, *advised)
    ratio = judgement.best["tokens_per_s"] / rival["tokens_per_s"]
    more = f"{abs(ratio - 1) * 100:.1f} % {'less' if ratio < 1 else 'more'} than {other}"
    return Sentence(OPEN, where, name, f" measured {speed}, {more}{rest}", *advised)


def _interval(change: Change | None) -> str:
    """`+1.2 %, between -0.3 % and +2.7 %`; empty where no interval is known."""
    if change is None or change.ratio is None:
        return ""
    ratio = change.ratio
    ends = (ratio.estimate, ratio.low, ratio.high)
    estimate, low, high = (written(end - 1, "+.1f", "%", 100) for end in ends)
    return f"{estimate}, between {low} and {high}"


def _or(names: Sequence[str], word: str) -> str:
    """`a, b or c`."""
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def tiles(judgement: Judgement) -> Iterator[Tile]:
    """Yield throughput, peak memory and bubble of the best case, each with its rival's."""
    sides = []
    for case in (judgement.best, judgement.rival):
        if case is not None:
            peak, theory = case["peak_memory_bytes"], case["bubble_fraction_theory"]
            memory = "not measured" if is_missing(peak) else size(peak)
            detail = "" if is_missing(theory) else f"theory {percent(theory)}"
            sides.append(
                [
                    ("Throughput", figure("tokens_per_s", case["tokens_per_s"]), ""),
                    ("Peak memory of the fullest rank", memory, ""),
                    ("Bubble", percent(case["bubble_fraction"]), detail),
                ]
            )
    for (title, value, detail), *beside in zip(*sides, strict=True):
        rival = ""
        if judgement.rival is not None:
            texts = ", ".join(filter(None, beside[0][1:]))
            rival = f"{judgement.names[judgement.rival_place]}: {texts}"
        yield Tile(title, value, detail, rival)


def _less(saved: Saving) -> str:
    """`13 % less memory`, `5.1 % to 20.8 % less memory`, `up to 20.8 % less memory`."""
    if saved.most - saved.least < ROUNDED:
        return comparison(1 - saved.most, "memory").removesuffix(" than")
    low = "up" if saved.least < ROUNDED else percent(saved.least)
    return f"{low} to {percent(saved.most)} less memory"


def _for_memory(other: str, saved: Saving, change: Change, why: str) -> str:
    """Say that a case is to be taken for its memory, unless that seems to cost half as much speed.

    `change` is that of the first case against the second, and `why` says why it is open where its
    interval is not known.
    """
    change = change if saved.is_first else change.reversed()
    if change.verdict is Verdict.slower or not change.base or change.head is None:
        return ""
    ratio = change.head / change.base if change.ratio is None else change.ratio.estimate
    if 1 - ratio > saved.mean / 2:
        return ""
    open_is = f"its speed differs by {_interval(change)}" if change.ratio else why
    return f" for its memory: it needs {_less(saved)} than {other}. Throughput is open: {open_is}."


def _why(judgement: Judgement) -> str:
    """Say why it is open; the first reason that holds."""
    if judgement.cautions:
        reasons = " and ".join(
            _WHY.get(name, f"of the caution {name}") for name in judgement.cautions
        )
        return f"{reasons} ({', '.join(judgement.cautions)})"
    if judgement.has_several_machines:
        return "they were measured on different machines"
    if judgement.fewest_launches < FEWEST_LAUNCHES:
        if judgement.fewest_launches == 1:
            return "a single launch cannot decide it"
        return f"{judgement.fewest_launches} launches cannot decide it"
    assert judgement.lead is not None
    rivals = judgement.places(Verdict.open) or [judgement.rival_place]
    names = [judgement.names[place] for place in rivals]
    lost = judgement.lead.most_lost(judgement.arms[0])
    if not math.isfinite(lost):
        return f"nothing is known of {_or(names[:MOST_NAMED], 'and')}"
    if lost > 1:  # hundreds of percent say nothing of a case
        could = "could be more than twice as fast (at 99 %)"
        return f"{_or(names[:MOST_NAMED], 'or')} {could}"
    could = f"could be faster by up to {written(lost, '.1f', '%', 100)} (at 99 %)"
    return f"{_or(names[:MOST_NAMED], 'or')} {could}"


def _under_memory(judgement: Judgement) -> Iterator[str]:
    """Name the case with most throughput for each smaller memory, along the Pareto front."""
    best = judgement.best
    cases = judgement.cases.dropna(subset=["peak_memory_bytes"])
    if len(cases) < 2 or is_missing(best["peak_memory_bytes"]):
        return
    peaks = cases["peak_memory_bytes"].map(rounded_size)  # as printed, so that steps are visible
    memory, speed = peaks.tolist(), cases["tokens_per_s"].tolist()
    front = cases.assign(peak_memory_bytes=peaks).iloc[pareto_front(memory, speed)[::-1]]
    names = dict(zip(judgement.arms, judgement.names, strict=True))
    clauses, last = [], front.iloc[0]["peak_memory_bytes"]
    for _, case in front.iloc[1:].iterrows():  # each that saves enough over the one before
        if case["peak_memory_bytes"] <= (1 - LEAST_SAVED) * last:
            last = case["peak_memory_bytes"]
            fewer = percent(1 - case["tokens_per_s"] / best["tokens_per_s"])
            name = names[str(case["case_id"])]
            clauses.append(f"{name} needs {size(last)} and measured {fewer} fewer tokens/s")
    if clauses:
        yield f"With less memory: {'; '.join(clauses[:MOST_SMALLER])}."
    else:
        yield (f"No case that does the same work needs much less memory than {judgement.names[0]}.")
