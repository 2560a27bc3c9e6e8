"""Which guesses are accepted: by source (SPECTRA, Figure 3), by confidence (UNISPEC, Figure 3)."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import itemgetter
from statistics import fmean

from slipstream.core.drafts import Draft
from slipstream.core.settings import Budget
from slipstream.data.rows import grouped
from slipstream.drafters.base import HostSession, Request, Session, Verified
from slipstream.drafters.guesses import AttachedGuessing
from slipstream.drafters.spectra import Spectra
from slipstream.drafters.unispec import UniSpec
from slipstream.evaluation.metrics import rate_interval
from studies import Plot, Prompt, Result, Rows, Target
from studies.decoding import Watched, decode, token_ids

BINS = 10
Node = tuple[Request, float, bool]
"""Whose it is, its confidence, and whether it was accepted."""


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

    def listen(session: HostSession, verified: Verified) -> None:
        for request, state in zip(verified.requests, session.states, strict=True):
            # the text goes on growing
            found = _guesses(attached, state.stored, request.tokens)
            said.append((request.tokens, len(request.tokens), found))

    decode(target, Watched(attached, listen), budget, ids)
    by_confidence = []
    for name, drafter in unispec.items():
        nodes: list[Node] = []

        def look(session: Session, verified: Verified, nodes=nodes) -> None:
            if not verified.prompt:
                nodes.extend(_judged(verified))

        decode(target, Watched(drafter.attach(target), look), budget, ids)
        by_confidence += [{"scores": name} | row for row in _by_confidence(nodes)]
    title, ends = "Acceptance by confidence of the node (UNISPEC, Figure 3)", ("low", "high")
    plots = (
        Plot("source", (right := "right share of tokens",), kind="bar", interval={right: ends}),
        Plot("mean", ("accepted",), hue="scores", table=title, interval={"accepted": ends}),
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


def _judged(verified: Verified) -> Iterator[Node]:
    """The nodes but the root."""
    (request,), (tree,), last = verified.requests, verified.trees.drafts(), int(verified.last)
    for node in range(1, len(tree)):
        yield request, tree.confidences[node], bool(verified.trees.ancestors[0, last, node])


def _by_source(said: list[tuple[list[int], int, dict[str, list]]]) -> Rows:
    """Of finished texts, their lengths when guesses were made, and the guesses: what would have
    come after the end of a text does not count."""
    rows = []
    for source in said[0][-1]:
        texts: dict[int, Counter] = defaultdict(Counter)
        for text, length, found in said:
            answer, guesses = text[length:], found[source]
            agreed = [Draft.chain([0, *guess]).agreement(answer) for guess in guesses]
            tokens = sum(min(len(guess), len(answer)) for guess in guesses)
            counts = dict(guesses=len(guesses), tokens=tokens, right=sum(agreed))
            texts[id(text)].update(counts, most=max(agreed, default=0))
        total = sum(texts.values(), Counter())
        rows.append({
            "source": source,
            "steps": len(said),
            "guesses a step": total["guesses"] / len(said),
            "tokens a guess": total["tokens"] / max(1, total["guesses"]),
            **_share("right share of tokens", [(e["right"], e["tokens"]) for e in texts.values()]),
            "longest right, mean": total["most"] / len(said),
        })  # fmt: skip
    return rows


def _by_confidence(nodes: list[Node]) -> Rows:
    rows, bins = [], grouped(nodes, lambda node: min(BINS - 1, int(node[1] * BINS)))
    for place, own in sorted(bins.items()):
        prompts = grouped(own, itemgetter(0)).values()
        counts = [(sum(accepted for *_, accepted in each), len(each)) for each in prompts]
        rows.append({
            "confidence": f"{place / BINS:.1f} to {(place + 1) / BINS:.1f}",
            "mean": fmean(confidence for _, confidence, _ in own),
            "nodes": len(own),
            "share of nodes": len(own) / len(nodes),
            **_share("accepted", counts),
        })  # fmt: skip
    return rows


def _share(name: str, counts: list[tuple[int, int]]) -> dict[str, float]:
    """The share that is right, with its 95 % interval; counts: (right, all) of each prompt."""
    right, of = zip(*counts, strict=True)
    if not sum(of):
        return {name: 0.0, "low": 0.0, "high": 0.0}
    low, high = rate_interval(right, of)
    return {name: sum(right) / sum(of), "low": low, "high": high}
