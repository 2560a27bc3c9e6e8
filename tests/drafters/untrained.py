"""Every drafter that needs no training, and the rules for the length of a draft that need none, for
tests."""

from collections.abc import Callable

from slipstream.drafters.auto import Auto
from slipstream.drafters.base import Attached, Drafter, Session
from slipstream.drafters.combined import Combined
from slipstream.drafters.draft_length import (
    AssistantThreshold,
    DraftLength,
    EntropyBound,
    GammaTune,
    Heuristic,
)
from slipstream.drafters.lookahead import Lookahead
from slipstream.drafters.prompt_lookup import AdaptiveNgram, PromptLookup
from slipstream.drafters.rest import Rest
from slipstream.drafters.spectra import Spectra
from slipstream.drafters.streaming import Streaming
from slipstream.drafters.suffix_decoding import SuffixDecoding
from slipstream.drafters.suffixes import Retrieval, SuffixStore
from slipstream.drafters.unispec import UniSpec


class Texts:
    """A corpus of given texts."""

    def __init__(self, texts: list[list[int]]):
        self.texts = texts

    def store(self, target) -> SuffixStore:
        return SuffixStore.of_texts(self.texts)


def retrieval(texts: list[list[int]]) -> Retrieval:
    return Retrieval(Texts(texts), max_ngram=3, max_matches=8, length=4)


def spectra(**changes) -> Spectra:
    settings = dict(
        candidates=2, ngram=3, guesses=3, unseen_probability=0.5, forward=True, backward=True,
        order="backward_first", chain=6, backward_share=0.75, sub_ngrams=True, retrieval=None,
        text=False, keep=False, accept_branches=True,
    )  # fmt: skip
    return Spectra(**(settings | changes))


def lookahead(**changes) -> Lookahead:
    settings = dict(
        window=2, ngram=3, guesses=3, text=False, retrieval=None, keep=False, accept_branches=True
    )  # fmt: skip
    return Lookahead(**(settings | changes))


def unispec(kind: type[UniSpec] = UniSpec, **changes) -> UniSpec:
    settings = dict(
        top_k=2, max_depth=3, threshold=0.05, trust=1.0, ranks=[0.5, 0.2, 0.1],
        wide_first_level=True, prompt=True, keep=False,
    )  # fmt: skip
    return kind(**(settings | changes))


def token_recycling(**changes) -> UniSpec:
    settings = dict(top_k=3, threshold=0.0, trust=0.0, wide_first_level=False)
    return unispec(**(settings | changes))


def combined(speculator=None, schedule: str = "deferred", **more) -> Combined:
    """UNISPEC and prompt lookup, and streams if there is a speculator."""
    drafters = {"unispec": unispec(), "prompt_lookup": PromptLookup(2, 3)} | more
    if speculator is not None:
        drafters = {"streaming": Streaming(speculator, schedule, 2)} | drafters
    return Combined(drafters)


def untrained(texts: list[list[int]]) -> dict[str, object]:
    """New drafters by name; texts: what retrieval finds drafts in."""
    return {
        "prompt lookup": PromptLookup(max_ngram=2, num_tokens=3),
        "adaptive n-grams": AdaptiveNgram(max_ngram=2, num_tokens=3),
        "token recycling": token_recycling(),
        "unispec": unispec(),
        "unispec, last row of the prompt": unispec(prompt=False, wide_first_level=False),
        "unispec, trusted in part": unispec(trust=0.3),
        "unispec, trusted as proven": unispec(trust="proven"),
        "unispec, kept": unispec(keep=True),
        "unispec, local scores": unispec(reading="local"),
        "lookahead": lookahead(),
        "lookahead, branches not accepted": lookahead(accept_branches=False),
        "lookahead, text, corpus, kept": lookahead(
            text=True, retrieval=retrieval(texts), keep=True
        ),
        "spectra": spectra(),
        "spectra, whole n-grams": spectra(sub_ngrams=False, backward=False),
        "spectra, the paper's order": spectra(order="forward_first", chain=3, backward_share=1.0),
        "spectra, text, corpus, kept": spectra(
            text=True, retrieval=retrieval(texts), keep=True, unseen_probability=1.0
        ),
        "rest": Rest(retrieval(texts)),
        "suffix decoding": SuffixDecoding(4, 2.0, 0.05, kept=0),
        "suffix decoding, kept": SuffixDecoding(4, 2.0, 0.05, kept=64),
        "combined": combined(),
        "auto": Auto({"unispec": unispec(), "prompt_lookup": PromptLookup(2, 3)}),
    }


def watched(drafter: Drafter, target, watch: Callable[[Session], None]) -> Attached:
    """Attached to `target`; `watch` is given every session before it starts."""
    attached = drafter.attach(target)
    start = attached.start

    def started(requests, budget: int) -> Session:
        session = start(requests, budget)
        watch(session)
        return session

    attached.start = started
    return attached


def gammatune(threshold: float | None = None, initial: float = 2, **changes) -> GammaTune:
    settings = dict(rate=0.5, bonus=2.0, least=1, most=4, carry=False) | changes
    return GammaTune(initial, threshold=threshold, **settings)


RULES = {
    "heuristic": lambda: Heuristic(initial=2, carry=False),
    "gammatune": gammatune,
    "gammatune_plus": lambda: gammatune(0.6, initial=3),
    "assistant_threshold": lambda: AssistantThreshold(0.45),
}


def stream_rules(vocabulary: int) -> dict[str, object]:
    """With thresholds that random streams of so many tokens are above and below."""
    sure, bound = (0.6, 0.57) if vocabulary < 10 else (0.2, 0.22)
    adaedl = dict(scale=0.2, goal=0.5, step=0.01, memory=0.5, inertia=0.5)
    return RULES | {
        "gammatune_plus": lambda: gammatune(sure, initial=3),
        "assistant_threshold": lambda: AssistantThreshold(sure),
        "adaedl": lambda: EntropyBound(threshold=bound, **adaedl),
    }


STREAM_RULES = tuple(stream_rules(0))
NGRAM_RULES = RULES | {"assistant_threshold": lambda: AssistantThreshold(0.6)}


def with_rules(target, speculator, top_k: int, free: bool = False) -> dict[str, object]:
    """Drafters that are no draft model, with each rule that fits them, by name; free: as many, but
    without rules."""

    def made(rule) -> DraftLength | None:
        return None if free else rule()

    found = {}
    for name, rule in stream_rules(target.vocab_size).items():
        for shape, schedule, k in (("trees", "deferred", top_k), ("chains", "fused", 1)):
            found[f"{schedule} {shape}, {name}"] = Streaming(
                speculator, schedule, k, length=made(rule)
            )
    for name, rule in NGRAM_RULES.items():
        found[f"prompt lookup, {name}"] = PromptLookup(2, 3, made(rule))
        found[f"adaptive n-grams, {name}"] = AdaptiveNgram(2, 3, made(rule))
    return found
