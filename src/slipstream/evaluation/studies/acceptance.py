"""Which guesses are accepted: by source (SPECTRA, Figure 3), by confidence (UNISPEC, Figure 3)."""

from collections import Counter

from rich.progress import track

from slipstream.core.sampling import Sampling
from slipstream.core.tree import DraftTree
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.spectra import Spectra
from slipstream.drafters.unispec import UniSpec
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets.target import Target

BINS = 10


class AcceptanceStudy:
    """Greedy decoding with `spectra`, and with UNISPEC's trees scored in each of the ways of
    `unispec`, by name; trees have `budget` nodes. What every source had to say is held against the
    finished answer, also what found no room."""

    def __init__(self, spectra: Spectra, unispec: dict[str, UniSpec], budget: int):
        self.spectra, self.unispec, self.budget = spectra, unispec, budget

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        sources = _Sources(self.spectra)
        confidences = {name: _Confidences(drafter) for name, drafter in self.unispec.items()}
        engines = [
            Engine(target, watched, Sampling(), Limits(96), self.budget)
            for watched in (sources, *confidences.values())
        ]
        for prompt in track(prompts, description="decoding"):
            for engine in engines:
                engine.generate(render_prompt(target.tokenizer, prompt.text))
        by_source = sources.rows()
        by_confidence = [
            {"scores": name} | row for name, own in confidences.items() for row in own.rows()
        ]
        return Findings(
            "Acceptance by source of the guess (SPECTRA, Figure 3)",
            by_source,
            lambda figure: _draw(figure, by_source, by_confidence),
            {"Acceptance by confidence of the node (UNISPEC, Figure 3)": by_confidence},
        )


class _Watched:
    """A drafter that is looked at: everything else is its own."""

    def __init__(self, drafter):
        self.drafter = drafter

    def __getattr__(self, name: str):
        return getattr(self.drafter, name)


class _Sources(_Watched):
    """Counts what SPECTRA's dictionaries and its corpus had to say."""

    def __init__(self, drafter: Spectra):
        super().__init__(drafter)
        self.said: list[tuple[list[int], int, dict[str, list]]] = []
        """Of each step: the text, which goes on growing, its length then, and the guesses."""

    def propose(self, contexts, budget: int) -> list[DraftTree]:
        trees = self.drafter.propose(contexts, budget)
        for context in contexts:
            self.said.append((context.tokens, len(context.tokens), self._sources(context)))
        return trees

    def _sources(self, context) -> dict[str, list]:
        stored, tokens = context.state.stored, context.tokens
        chain = stored.chain(tokens, self.drafter.chain)
        found = {
            "backward dictionary": [chain] if chain else [],
            "forward dictionary": list(stored.forward.starting_with(tokens[-1])),
        }
        if self.drafter.retrieval is not None:
            found["corpus"] = self.drafter.retrieval.continuations(tokens)
        return found

    def rows(self) -> list[dict[str, object]]:
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


class _Confidences(_Watched):
    """Counts which nodes of UNISPEC's trees were accepted."""

    def __init__(self, drafter: UniSpec):
        super().__init__(drafter)
        self.nodes, self.accepted, self.confidence = Counter(), Counter(), Counter()

    def observe(self, context, step) -> None:
        if context.max_depth:  # not of the prefill
            for node in range(1, len(step.tree)):
                confidence = step.tree.confidences[node]
                place = min(BINS - 1, int(confidence * BINS))
                self.nodes[place] += 1
                self.confidence[place] += confidence
                self.accepted[place] += node in step.path
        self.drafter.observe(context, step)

    def rows(self) -> list[dict[str, object]]:
        total = self.nodes.total()
        return [
            {
                "confidence": f"{place / BINS:.1f} to {(place + 1) / BINS:.1f}",
                "mean": self.confidence[place] / self.nodes[place],
                "nodes": self.nodes[place],
                "share of nodes": self.nodes[place] / total,
                "accepted": self.accepted[place] / self.nodes[place],
            }
            for place in sorted(self.nodes)
        ]


def _agreeing(guess, answer: list[int]) -> int:
    """How many tokens of `answer` the guess begins with."""
    agreed = 0
    for one, other in zip(guess, answer, strict=False):
        if one != other:
            break
        agreed += 1
    return agreed


def _draw(figure, by_source: list[dict], by_confidence: list[dict]) -> None:
    left, right = figure.subplots(1, 2)
    left.barh(
        [row["source"] for row in by_source],
        [row["right share of tokens"] for row in by_source],
    )
    left.invert_yaxis()
    left.set_xlabel("share of guessed tokens that are the answer's")
    for scores in dict.fromkeys(row["scores"] for row in by_confidence):
        own = [row for row in by_confidence if row["scores"] == scores]
        right.plot(
            [row["mean"] for row in own], [row["accepted"] for row in own], "-o", label=scores
        )
    right.plot([0, 1], [0, 1], ":", color="gray", label="confidence = acceptance")
    right.set(xlabel="confidence of a node", ylabel="accepted share of nodes")
    right.legend()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
