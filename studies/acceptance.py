"""Which guesses are accepted: by source (SPECTRA, Figure 3), by confidence (UNISPEC, Figure 3)."""

from collections import Counter
from itertools import takewhile

from rich.progress import track

from slipstream.core.sampling import Sampling
from slipstream.core.trees import Trees
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.base import Attached, Session, Verified
from slipstream.drafters.guesses import AttachedGuessing, GuessingSession
from slipstream.drafters.spectra import Spectra
from slipstream.drafters.unispec import UniSpec
from slipstream.evaluation.prompts import Prompt
from slipstream.results.record import Plot, Result, Rows
from slipstream.targets.target import Target
from studies.watching import Watched

BINS = 10


def acceptance(
    target: Target,
    prompts: list[Prompt],
    spectra: Spectra,
    unispec: dict[str, UniSpec],
    budget: int,
) -> Result:
    """Greedy decoding with `spectra`, and with UNISPEC's trees scored in each of the ways of
    `unispec`, by name; trees have `budget` nodes. What every source had to say is held against the
    finished answer, also what found no room."""
    sources = _Sources(spectra.attach(target))
    confidences = {name: _Confidences(each.attach(target)) for name, each in unispec.items()}
    for watched in track([sources, *confidences.values()], description="decoding"):
        engine = Engine(target, watched, Sampling(), Limits(96), budget)
        for prompt in prompts:
            engine.generate(render_prompt(target.tokenizer, prompt.text))
    by_confidence = [
        {"scores": name} | row for name, own in confidences.items() for row in own.rows()
    ]
    title = "Acceptance by confidence of the node (UNISPEC, Figure 3)"
    plots = (
        Plot("source", ("right share of tokens",), kind="bar"),
        Plot("mean", ("accepted",), hue="scores", table=title),
    )
    first = "Acceptance by source of the guess (SPECTRA, Figure 3)"
    return Result(first, sources.rows(), plots, {title: by_confidence})


class _Sources(Watched):
    """Notes what SPECTRA's dictionaries and its corpus had to say at each step: the text, which
    goes on growing, its length then, and the guesses."""

    def __init__(self, attached: AttachedGuessing):
        super().__init__(attached, self._note)
        self.said: list[tuple[list[int], int, dict[str, list]]] = []

    def _note(self, session: GuessingSession, verified: Verified, drafted: Trees) -> None:
        settings, retrieved = self.attached.settings, self.attached.retrieved
        for request, state in zip(session.requests, session.states, strict=True):
            stored, tokens = state.stored, request.tokens
            chain = stored.chain(tokens, settings.chain)
            found = {
                "backward dictionary": [chain] if chain else [],
                "forward dictionary": list(stored.forward.starting_with(tokens[-1])),
            }
            if retrieved is not None:
                found["corpus"] = retrieved.continuations(tokens)
            self.said.append((tokens, len(tokens), found))

    def rows(self) -> Rows:
        """All texts being finished: what would have come after the end of one does not count."""
        guesses, guessed, accepted, longest = Counter(), Counter(), Counter(), Counter()
        for text, length, found in self.said:
            answer = text[length:]
            for source, own in found.items():
                agreed = [_agreeing(guess, answer) for guess in own]
                guesses[source] += len(own)
                guessed[source] += sum(min(len(guess), len(answer)) for guess in own)
                accepted[source] += sum(agreed)
                longest[source] += max(agreed, default=0)
        steps = len(self.said)
        return [
            {
                "source": source,
                "steps": steps,
                "guesses a step": guesses[source] / steps,
                "tokens a guess": guessed[source] / max(1, guesses[source]),
                "right share of tokens": accepted[source] / max(1, guessed[source]),
                "longest right, mean": longest[source] / steps,
            }
            for source in guesses
        ]


class _Confidences(Watched):
    """Counts which nodes of UNISPEC's trees were accepted."""

    def __init__(self, attached: Attached):
        super().__init__(attached, self._count)
        self.nodes, self.accepted, self.confidence = Counter(), Counter(), Counter()

    def _count(self, session: Session, verified: Verified, drafted: Trees) -> None:
        if verified.prompt:
            return
        (tree,), last = verified.trees.drafts(), int(verified.last)
        for node in range(1, len(tree)):
            confidence = tree.confidences[node]
            place = min(BINS - 1, int(confidence * BINS))
            self.nodes[place] += 1
            self.confidence[place] += confidence
            self.accepted[place] += bool(verified.trees.ancestors[0, last, node])

    def rows(self) -> Rows:
        return [
            {
                "confidence": f"{place / BINS:.1f} to {(place + 1) / BINS:.1f}",
                "mean": self.confidence[place] / self.nodes[place],
                "nodes": self.nodes[place],
                "share of nodes": self.nodes[place] / self.nodes.total(),
                "accepted": self.accepted[place] / self.nodes[place],
            }
            for place in sorted(self.nodes)
        ]


def _agreeing(guess, answer: list[int]) -> int:
    """How many tokens of `answer` the guess begins with."""
    pairs = zip(guess, answer, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
