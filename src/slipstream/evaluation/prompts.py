"""The prompts a run decodes: rows of test files, or generated ones, with their references."""

from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Literal

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Count, Seed
from slipstream.data.rendering import render_prompt, text_ids
from slipstream.data.rows import Messages, Row, by_prompt, grouped, messages_of, spread
from slipstream.data.sources import HubSets, Kinds, Paths, Sources
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.targets.target import Target


@dataclass(frozen=True)
class Prompt:
    """One prompt. text: or the messages of a conversation; source: its prompt set; references:
    known good answers, possibly none; later: questions that are asked after the answer."""

    text: str | Messages
    source: str
    references: tuple[str, ...] = ()
    later: tuple[str, ...] = ()

    @property
    def question(self) -> str:
        """What is to be answered: of a conversation its last message."""
        return messages_of(self.text)[-1]["content"]

    def asking(self, question: str) -> "Prompt":
        """The same prompt with another question."""
        if isinstance(self.text, str):
            return replace(self, text=question)
        return replace(self, text=[*self.text[:-1], self.text[-1] | {"content": question}])


class PromptSets:
    """Prompts of one or several sets.

    path, hub, synthetic_kinds, seed: as `Sources` has them; generated prompts are held out from
    those used in training. split: of files, folders and data sets; 'validation' where something is
    chosen by it. cut: whether prompts that leave no room for a whole answer are cut, in place of
    being left out where they do not fit the context. categories: whether the categories of a
    benchmark are sets of their own. turns: most questions of a conversation that are asked, each
    after the target's own answers to those before.
    """

    def __init__(
        self,
        path: Paths,
        hub: HubSets,
        synthetic_kinds: Kinds,
        split: Literal["test", "validation"],
        seed: Seed,
        cut: bool = False,
        categories: bool = False,
        turns: Count = 1,
    ):
        self.split, self.cut, self.categories, self.turns = split, cut, categories, turns
        self.sources = Sources(path, hub, synthetic_kinds, seed)

    def take(self, count: int) -> list[Prompt]:
        """`count` distinct prompts, in equal parts from every set, spread evenly over each; their
        later turns not counted."""
        if not self.sources.given:
            rows = self.sources.synthetic(count, self.split)
            return [Prompt(row.prompt, row.source) for row in rows]
        tables = self.sources.tables(self.split, completion_required=False)
        if self.split == "validation" and any(Path(own).is_file() for own in self.sources.paths):
            print(
                "note: a single file of data.path has the same prompts for validation and test; "
                "measure what is chosen by them on others"
            )
        if self.categories:
            tables = [part for table in tables for part in by_category(table)]
        sets = []
        for number, table in enumerate(tables):
            prompts = []
            for own in by_prompt(table):
                answers = tuple(row.completion for row in own if row.completion)
                later = own[0].later[: self.turns - 1]
                prompts.append(Prompt(own[0].prompt, own[0].source, answers, later))
            sets.append(spread(prompts, (count - number - 1) // len(tables) + 1))
        in_turn = chain.from_iterable(zip_longest(*sets))
        return [prompt for prompt in in_turn if prompt is not None]

    def take_for(self, target: Target, limits: Limits, count: int) -> list[Prompt]:
        """Those of `count` prompts that fit the target, with their later turns."""
        cut_to = target.max_positions - limits.max_new_tokens if self.cut else None
        if cut_to is not None and cut_to < 1:
            raise InputError(
                f"data.cut: answers of {limits.max_new_tokens} tokens fill the target's context of "
                f"{target.max_positions}; lower limits.max_new_tokens, or set data.cut=false"
            )
        fit = fitting(self.take(count), target, cut_to)
        return with_later_turns(fit, target, limits, cut_to)


def by_category(rows: list[Row]) -> list[list[Row]]:
    """The rows of each category, named after it."""
    named = [replace(r, source=f"{r.source}/{r.category}") if r.category else r for r in rows]
    return list(grouped(named, lambda row: row.source).values())


def with_later_turns(
    prompts: list[Prompt], target: Target, limits: Limits, cut_to: int | None = None
) -> list[Prompt]:
    """Each prompt followed by its later questions, asked after the target's own answers (greedy) to
    those before. One that leaves no room in the target's context ends its conversation; cut_to: as
    `fitting` has it."""
    from rich.progress import track  # which studies on a GPU machine do without

    decoder, found = PlainDecoder(target, Sampling(), limits), []
    room, count = target.max_positions - 1, 0
    for prompt in track(prompts, "earlier turns", disable=not any(each.later for each in prompts)):
        found.append(prompt)
        for place, question in enumerate(prompt.later):
            before = messages_of(found[-1].text)
            answer = decoder.generate(render_prompt(target.tokenizer, before)).text
            said = {"role": "assistant", "content": answer}, {"role": "user", "content": question}
            following = Prompt([*before, *said], prompt.source)
            if cut_to is not None:
                following = _cut(following, target, min(cut_to, room))
            rendered = render_prompt(target.tokenizer, following.text)
            if not following.question or len(rendered) > room:
                count += len(prompt.later) - place
                break
            found.append(following)
    if count:
        print(f"note: {count} later turns are left out; with the turns before they do not fit")
    return found


def places_by_set(prompts: list[Prompt]) -> dict[str, list[int]]:
    """The places of each set's prompts."""
    return grouped(range(len(prompts)), lambda place: prompts[place].source)


def fitting(prompts: list[Prompt], target: Target, cut_to: int | None = None) -> list[Prompt]:
    """The prompts that leave room for an answer in the target's context; says how many do not.
    cut_to: longer prompts lose their last words until they have so many tokens; None to leave out
    those that do not fit. Raises `InputError` if none fits."""
    room, given = target.max_positions - 1, len(prompts)
    if cut_to is not None:
        cut = [_cut(prompt, target, min(cut_to, room)) for prompt in prompts]
        if count := sum(one != other for one, other in zip(prompts, cut, strict=True)):
            print(f"note: {count} of {given} prompts are cut to {cut_to} tokens")
        prompts = [prompt for prompt in cut if prompt.question]  # some may be cut to nothing
    kept = [p for p in prompts if 1 <= len(render_prompt(target.tokenizer, p.text)) <= room]
    if not kept:
        raise InputError(
            f"data: no prompt fits the target's context of {target.max_positions} tokens; choose "
            "shorter prompts, or a target with a longer one"
        )
    if len(kept) < given:
        left_out = f"{given - len(kept)} of {given} prompts are left out"
        print(f"note: {left_out}; they have more than {room} tokens, or none")
    return kept


def _cut(prompt: Prompt, target: Target, room: int) -> Prompt:
    """`prompt` without as many of its last tokens as do not fit into `room`."""
    tokenizer = target.tokenizer
    while prompt.question and (excess := len(render_prompt(tokenizer, prompt.text)) - room) > 0:
        tokens = text_ids(tokenizer, prompt.question)
        # Part of a character would stand for itself, and take more tokens than it had.
        prompt = prompt.asking(tokenizer.decode(tokens[:-excess]).rstrip("\ufffd"))
    return prompt
