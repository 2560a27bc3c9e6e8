"""Which guesses are accepted: by source (SPECTRA, Figure 3), by confidence (UNISPEC, Figure 3)."""

from collections import Counter
from collections.abc import Iterator
from statistics import fmean

from slipstream.core.drafts import Draft
from slipstream.core.settings import Budget
from slipstream.core.trees import Trees
from slipstream.drafters.base import HostSession, Session, Verified
from slipstream.drafters.guesses import AttachedGuessing
from slipstream.drafters.spectra import Spectra
from slipstream.drafters.unispec import UniSpec
from studies import Plot, Prompt, Result, Rows, Target
from studies.decoding import Watched, decode, engine, token_ids

BINS = 10


def acceptance(
    target: Target,
    prompts: list[Prompt],
    spectra: Spectra,
    unispec: dict[str, UniSpec],
    budget: Budget,
) -> Result:
    """Greedy decoding with `spectra`, and with UNISPEC's trees scored in each of the ways of
    `unispec`, by name; trees have `budget` nodes. What every source had to say is held against the
    finished answer, also what found no room."""
    ids, said, attached = token_ids(target, prompts), [], spectra.attach(target)

    def listen(session: HostSession, verified: Verified, drafted: Trees) -> None:
        for request, state in zip(verified.requests, session.states, strict=True):
            # the text goes on growing
            found = _guesses(attached, state.stored, request.tokens)
            said.append((request.tokens, len(request.tokens), found))

    decode(engine(target, Watched(attached, listen), budget), ids)
    by_confidence = []
    for name, drafter in unispec.items():
        nodes: list[tuple[float, bool]] = []

        def look(session: Session, verified: Verified, drafted: Trees, nodes=nodes) -> None:
            if not verified.prompt:
                nodes.extend(_judged(verified))

        decode(engine(target, Watched(drafter.attach(target), look), budget), ids)
        by_confidence += [{"scores": name} | row for row in _by_confidence(nodes)]
    title = "Acceptance by confidence of the node (UNISPEC, Figure 3)"
    plots = (
        Plot("source", ("right share of tokens",), kind="bar"),
        Plot("mean", ("accepted",), hue="scores", table=title),
    )
    first = "Acceptance by source of the guess (SPECTRA, Figure 3)"
    return Result(first, _by_source(said), plots, {title: by_confidence})


def _guesses(attached: AttachedGuessing, stored, tokens: list[int]) -> dict[str, list]:
    """What SPECTRA's dictionaries and its corpus have to say, by source."""
    chain = stored.chain(tokens, attached.settings.chain)
    found = {
        "backward dictionary": [chain] if chain else [],
        "forward dictionary": list(stored.starting_with(tokens[-1])),
    }
    if attached.retrieved is not None:
        found["corpus"] = attached.retrieved.continuations(tokens)
    return found


def _judged(verified: Verified) -> Iterator[tuple[float, bool]]:
    """The confidence of each node but the root, and whether it was accepted."""
    (tree,), last = verified.trees.drafts(), int(verified.last)
    for node in range(1, len(tree)):
        yield tree.confidences[node], bool(verified.trees.ancestors[0, last, node])


def _by_source(said: list[tuple[list[int], int, dict[str, list]]]) -> Rows:
    """Of finished texts, their lengths when guesses were made, and the guesses: what would have
    come after the end of a text does not count."""
    totals: dict[str, Counter] = {}
    for text, length, found in said:
        answer = text[length:]
        for source, guesses in found.items():
            agreed = [Draft.chain([0, *guess]).agreement(answer) for guess in guesses]
            tokens = sum(min(len(guess), len(answer)) for guess in guesses)
            totals.setdefault(source, Counter()).update(
                guesses=len(guesses), tokens=tokens, right=sum(agreed), most=max(agreed, default=0)
            )
    return [
        {
            "source": source,
            "steps": len(said),
            "guesses a step": own["guesses"] / len(said),
            "tokens a guess": own["tokens"] / max(1, own["guesses"]),
            "right share of tokens": own["right"] / max(1, own["tokens"]),
            "longest right, mean": own["most"] / len(said),
        }
        for source, own in totals.items()
    ]


def _by_confidence(nodes: list[tuple[float, bool]]) -> Rows:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for node in nodes:
        bins.setdefault(min(BINS - 1, int(node[0] * BINS)), []).append(node)
    return [
        {
            "confidence": f"{place / BINS:.1f} to {(place + 1) / BINS:.1f}",
            "mean": fmean(confidence for confidence, _ in own),
            "nodes": len(own),
            "share of nodes": len(own) / len(nodes),
            "accepted": fmean(accepted for _, accepted in own),
        }
        for place, own in sorted(bins.items())
    ]
