"""Questions over one table, in the many manners of people who write them by the dozen.

A frame is one manner of asking: it turns a `Wording` into a question. `ask` picks a frame. It knows
nothing of schemas or of SQL text.
"""

from collections.abc import Callable
from random import Random

from tools.synthetic import phrases
from tools.synthetic.grammar import weighted
from tools.synthetic.wording import (
    COUNT,
    PLAIN,
    Intent,
    Wording,
    capitalised,
    listed,
    phrase_for,
    plural,
    with_article,
)

NAMED_KINDS = ("person", "club", "franchise", "country", "title", "college", "surname")


def what_is(wording: Wording) -> str:
    """'What is the venue with a crowd of 12,000?'"""
    is_the = "'s the" if wording.rng.random() < 0.08 else f" {wording.be} the"
    return f"{wording.pronoun()}{is_the} {wording.wanted()} {wording.linked()}?"


def what_is_of_subject(wording: Wording) -> str:
    """'What was the score of the game on May 3?'"""
    link = wording.rng.choice(("of the", "of the", "for the", "in the"))
    opening = f"{wording.pronoun()} {wording.be} the {wording.wanted()}"
    return f"{opening} {link} {wording.intent.subject} {wording.natural()}?"


def what_is_natural(wording: Wording) -> str:
    """'What was the score on May 3?', 'Which score was on May 3?'"""
    conditions = wording.natural()
    if wording.rng.random() < 0.5 and not conditions.startswith("with"):
        opening = wording.rng.choice(("What", "Which"))
        return f"{opening} {wording.wanted()} {wording.be} {conditions}?"
    return f"{wording.pronoun()} {wording.be} the {wording.wanted()} {conditions}?"


def which_has(wording: Wording) -> str:
    """'Which Venue has a Crowd larger than 9,000, and a Date of may 3?'"""
    rng, aggregate = wording.rng, wording.intent.aggregate
    if rng.random() < 0.6:
        wording.header_case, wording.lower_values = "as is", rng.random() < 0.8
    items = [with_article(wording.measured(condition)) for condition in wording.intent.conditions]
    verb = rng.choices((wording.have, "has", "have"), (4, 4, 1))[0]
    wanted = wording.wanted()
    if aggregate in ("MAX", "MIN") and rng.random() < 0.4:
        extreme = "highest" if aggregate == "MAX" else "lowest"
        wanted = f"{wording.header(wording.intent.wanted)} is the {extreme} one that"
    opening = rng.choices(("Which", "What", "which"), (12, 6, 1))[0]
    last = rng.choice((", and ", ", and ", " and "))
    return f"{opening} {wanted} {verb} {listed(items, last)}?"


def which_has_as(wording: Wording) -> str:
    """'What Venue has May 3 as the Date?'; for equalities."""
    conditions = wording.intent.conditions
    if any(condition.operator != "=" for condition in conditions):
        return which_has(wording)
    items = [f"{wording.value(c)} as the {wording.header(c.column)}" for c in conditions]
    opening, last = wording.rng.choice(("What", "Which")), wording.rng.choice((", and ", " and "))
    return f"{opening} {wording.wanted()} has {listed(items, last)}?"


def comma_when(wording: Wording) -> str:
    """'What is Venue, when Crowd is greater than 9,000, and when Date is "May 3"?'"""
    wording.header_case = wording.rng.choice(("title", "as is"))
    wording.quotes = wording.rng.random() < 0.55
    items = []
    for condition in wording.intent.conditions:
        than = {"=": "", ">": "greater than ", "<": "less than "}[condition.operator]
        text = condition.value if than else wording.value(condition)
        items.append(f"when {wording.header(condition.column)} is {than}{text}")
    the = "" if wording.intent.aggregate == PLAIN else "the "
    return f"What is {the}{wording.wanted()}, {listed(items, ', and ')}?"


def imperative(wording: Wording) -> str:
    """'Name the venue for may 3'"""
    opening = weighted(phrases.IMPERATIVES, wording.rng)
    end = "?" if opening.startswith("Can") or wording.rng.random() < 0.08 else ""
    if wording.rng.random() < 0.25:
        return f"{opening} {wording.wanted()} {wording.natural()}{end}"
    conditions = wording.linked("for", "with", "that", "when", "of")
    return f"{opening} {wording.wanted()} {conditions}{end}"


def conditions_first(wording: Wording) -> str:
    """'When the crowd was 9,000, what was the venue?'"""
    opening = wording.rng.choice(("when", "when", "if", "with", "for", "in", "where"))
    comma = wording.rng.choice((",", ",", ""))
    question = f"{wording.pronoun().lower()} {wording.be} the {wording.wanted()}"
    return f"{capitalised(wording.linked(opening))}{comma} {question}?"


def had_what(wording: Wording) -> str:
    """'Crowd of 9,000 had what venue?'"""
    items = [wording.measured(condition) for condition in wording.intent.conditions]
    verb = wording.rng.choice(("had what", "has what", "is what", "involves what"))
    return f"{capitalised(listed(items, ', and a '))} {verb} {wording.wanted()}?"


def about_name(wording: Wording) -> str:
    """'What is Elena Voss's position?'; for one condition on a name."""
    conditions = wording.intent.conditions
    if len(conditions) > 1 or conditions[0].column.kind not in NAMED_KINDS:
        return what_is_natural(wording)
    form = weighted(phrases.ABOUT_NAME, wording.rng)
    return form.format(n=wording.value(conditions[0]), w=wording.wanted(), be=wording.be)


def own_words(wording: Wording) -> str:
    """'Who directed the episode titled "The Paper Mirror"?'; for columns with a way of asking."""
    form = phrase_for(phrases.ASKS, wording.intent.wanted, wording.rng)
    if form is None or wording.intent.aggregate != PLAIN:
        return what_is_of_subject(wording)
    conditions = wording.natural() if wording.rng.random() < 0.75 else wording.linked()
    return f"{form.format(subject=wording.intent.subject)} {conditions}?"


def how_many(wording: Wording) -> str:
    """'How many venues had a crowd of 9,000?'; for COUNT."""
    fields = {
        "w": plural(wording.header(wording.intent.wanted)),
        "s": plural(wording.intent.subject),
        "natural": wording.natural(),
        "with": wording.linked(),
        "when": wording.linked("when the", "where the").split(" ", 1)[1],
        "that": wording.linked("that").removeprefix("that ").replace("has ", "have ", 1),
    }
    return weighted(phrases.HOW_MANY, wording.rng).format(**fields)


def without_conditions(wording: Wording) -> str:
    """'What is the highest attendance?', 'How many players are there?'"""
    if wording.intent.aggregate == COUNT and wording.rng.random() < 0.5:
        return f"How many {plural(wording.header(wording.intent.wanted))} are there?"
    form = wording.rng.choice(phrases.WITHOUT_CONDITIONS)
    return form.format(w=wording.wanted(), s=plural(wording.intent.subject))


FRAMES: dict[Callable[[Wording], str], int] = {
    what_is: 19,
    which_has: 15,
    own_words: 18,
    imperative: 10,
    what_is_of_subject: 9,
    what_is_natural: 8,
    comma_when: 7,
    about_name: 6,
    conditions_first: 5,
    which_has_as: 5,
    had_what: 1,
}


def choose_frame(intent: Intent, rng: Random) -> Callable[[Wording], str]:
    if not intent.conditions:
        return without_conditions
    if intent.aggregate == COUNT and rng.random() < 0.8:
        return how_many
    return weighted(FRAMES, rng)


def ask(intent: Intent, rng: Random) -> str:
    """The question for `intent`: 'What was the score of the game on May 3?'.

    A few are typed carelessly: all in capitals, without any, or without a question mark.
    """
    text = choose_frame(intent, rng)(Wording(intent, rng))
    draw = rng.random()
    if draw < 0.006:
        return text.upper()
    if draw < 0.025:
        return text.lower().removesuffix("?")
    if draw < 0.06:
        return text[0].lower() + text[1:].removesuffix("?")
    return text
