"""Streams at work on a batch of requests: fused with the verifying forward, or deferred.

The pruning head, which drops nodes in the middle of that forward, is here, too. All stays on the
device, unless a rule for the draft length must look.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from slipstream.core.cache import StepCache
from slipstream.core.transfer import on_device, right_padded
from slipstream.core.trees import Trees, survivors
from slipstream.drafters.base import Attached, Request, Session, Verified
from slipstream.drafters.draft_length import Grown, Lengths
from slipstream.drafters.drawn_streams import drawn_trees
from slipstream.speculators.streaming.steps import AddedStreams, StreamSteps
from slipstream.targets.rows import HiddenTap, LayerVisitor, Rows
from slipstream.targets.target import Target

TEXT_ROOM = 256
"""Texts are padded to multiples of so many tokens where steps are replayed, so that these have few
shapes; elsewhere they are as long as they must be."""


class StreamSession(Session):
    """Trees from streams; subclasses say when these run.

    streams: `AttachedStreaming`; speculator: of those that a tree has levels for; visitors: their
    part in the forward, the same for all sessions.
    """

    def __init__(self, streams: Attached, requests: Sequence[Request], budget: int):
        self.streams, self.target = streams, streams.target
        self.speculator, self.visitors = streams.reaching(budget - 1)
        count = self.speculator.num_streams
        self.extra_rows = count * budget if streams.adds_rows else count + 1
        # (B, T), padded with -1, and whether all that is decided stands there
        self.texts, self.current = None, True
        self.multiple = TEXT_ROOM if self.target.compiled else 1
        if streams.pairs is not None and self.speculator.copying is not None:
            texts = [request.tokens for request in requests]
            self.texts = right_padded(texts, self.target.device, value=-1)
        self.lengths = streams.length and Lengths(streams.length, len(requests))

    @staticmethod
    @abstractmethod
    def visitor(target: Target, speculator: StreamSteps) -> LayerVisitor:
        """The streams' own part in the verifying forward."""

    @abstractmethod
    def asked(self, verified: Verified) -> tuple[torch.Tensor, ...]:
        """What `states` needs of the last accepted nodes."""

    @staticmethod
    @abstractmethod
    def states(
        streams: Attached, cache: StepCache, speculator: StreamSteps, slots: int, *asked
    ) -> torch.Tensor:
        """(B, gamma, D): the streams of these nodes, before the final norm; slots: before the rows
        that are staged. A function of tensors alone, so that it may be replayed."""

    def ask(self, verified: Verified) -> None:
        if self.lengths is not None:
            self.lengths.ask(verified)

    def draft(self, verified: Verified, budget: int) -> Trees:
        roots = verified.next_tokens
        if budget < 2 or verified.most_room < 2:
            trees, self.current = Trees.roots(roots), False
            if self.lengths is not None:
                self.lengths.begin([0] * len(roots))
                self.lengths.drafted = trees
            return trees
        if self.texts is not None:
            self._read(verified)
        room, texts = verified.room, () if self.texts is None else (self.texts,)
        draws = self.streams.draws and not all(each.sampling.greedy for each in verified.requests)
        if not draws and self.lengths is None:
            return self._replayed(self.streams.drafted, verified, (budget,), roots, room, *texts)
        logits = self._replayed(self.streams.logits, verified)
        if self.lengths is not None:
            wanted = self._wanted(logits[:, : verified.most_room - 1])
            room = torch.minimum(room, wanted + 1)
        if draws:
            given = verified.requests, logits, budget, roots, room, self.texts
            trees = drawn_trees(self.streams, *given)
        else:
            given = logits, roots, room, *texts
            trees = self.target.replayed(self.streams.grown, (budget,), *given)
        if self.lengths is not None:
            self.lengths.drafted = trees
        return trees

    def _replayed(
        self, run: Callable, verified: Verified, settings: tuple = (), *given: torch.Tensor
    ) -> object:
        """`run`, of `AttachedStreaming`, with the states of the streams."""
        cache, asked = verified.cache, self.asked(verified)
        settings = len(asked), self.speculator, cache.slots, *settings
        # Prompts differ in length, and what is pruned without a cap on a CPU in rows.
        often = not verified.prompt and all(each.replays for each in self.visitors)
        found = self.target.replayed(run, settings, *asked, *given, often=often, cache=cache)
        cache.forget_staged()
        return found

    def _read(self, verified: Verified) -> None:
        """Add the decided tokens to the texts; after steps without drafts, all the host knows."""
        decided, known = verified.decided, [request.tokens for request in verified.requests]
        if not self.current:
            verified.host()
            self.texts, self.current = right_padded(known, decided.device, value=-1), True
        width = max(self.texts.shape[1], max(map(len, known)) + decided.shape[1])
        self.texts = _wider(self.texts, -(-width // self.multiple) * self.multiple)
        first = verified.cache.ends + 1 - verified.counts
        places = first[:, None] + torch.arange(decided.shape[1], device=decided.device)
        self.texts = self.texts.scatter(1, places, decided)

    def _wanted(self, logits: torch.Tensor) -> torch.Tensor:
        """(B,): how deep the rules want each tree, from (B, levels, V) logits; the host waits."""
        depths = self.lengths.begin([logits.shape[1]] * len(logits))
        if self.lengths.rule.looks_at != "nothing":
            likeliest = logits.argmax(-1)
            for level in range(logits.shape[1]):
                going = [place for place, depth in enumerate(depths) if level < depth]
                grown = Grown(logits[going, level], likeliest[going, level])
                self.lengths.look(grown, going, depths, level + 1)
        return on_device(depths, logits.device)

    def keep(self, indices: list[int]) -> None:
        if self.texts is not None:
            self.texts = self.texts[on_device(indices, self.texts.device)]
        if self.lengths is not None:
            self.lengths.keep(indices)

    def join(self, other: "StreamSession") -> None:
        if self.texts is not None:
            widest = max(self.texts.shape[1], other.texts.shape[1])
            self.texts = torch.cat([_wider(texts, widest) for texts in (self.texts, other.texts)])
            self.current = self.current and other.current
        if self.lengths is not None:
            self.lengths.join(other.lengths)


class FusedSession(StreamSession):
    """Every node of the verifying forward carries streams."""

    visitor = AddedStreams

    def asked(self, verified: Verified) -> tuple[torch.Tensor, ...]:
        rows = verified.rows
        # Of a prompt, the last row alone carries streams.
        carrier = torch.zeros_like(verified.last) if verified.prompt else verified.last
        return rows.hidden[:, rows.num_nodes :], carrier

    @staticmethod
    def states(streams, cache, speculator, slots, *asked) -> torch.Tensor:
        rows, carrier = asked
        rows = rows.unflatten(1, (-1, speculator.num_streams))
        return rows[torch.arange(len(rows), device=rows.device), carrier]


class DeferredSession(StreamSession):
    """The streams of the last accepted nodes run in a pass of their own, after the commit."""

    @staticmethod
    def visitor(target: Target, speculator: StreamSteps) -> HiddenTap:
        return HiddenTap(speculator.first_layer)

    def asked(self, verified: Verified) -> tuple[torch.Tensor, ...]:
        """States before the MSA layers; (B,) the nodes' places among them, and after these layers;
        roots, positions of the rows after them, and the ends of what is committed."""
        last, rows, layer = verified.last, verified.rows, self.speculator.first_layer
        tapped = last
        if rows.kept is not None and rows.kept_from > layer:
            tapped = rows.kept[verified.each, last]
        positions = rows.positions.expand(len(last), -1)
        roots, ends = verified.next_tokens, verified.cache.ends
        return rows.seen[layer], tapped, last, roots, positions, ends

    @staticmethod
    def states(streams, cache, speculator, slots, *asked) -> torch.Tensor:
        hidden, tapped, last, roots, positions, ends = asked
        each = torch.arange(len(last), device=last.device)
        seen = torch.arange(slots, device=last.device) < ends[:, None]
        hidden, positions = hidden[each, tapped], positions[each, last]
        place = hidden[:, None], roots[:, None], positions[:, None], seen[:, None, None]
        return speculator.run_streams(streams.target, *place, cache, streams.merged)


class Pruning:
    """A visitor at the pruning layer: drops the nodes that the early exit finds unlikely.

    A batch is not pruned (appendix L): its sequences would keep different rows. cap: how many rows
    stay, padding among them. None is for as many as reach `threshold`; where the host would have to
    wait for their number (`counts` is False), it is for half of the tree.
    """

    def __init__(self, target: Target, speculator: StreamSteps, threshold: float, cap: int | None):
        self.target, self.speculator = target, speculator
        self.threshold, self.cap = threshold, cap
        self.layer = speculator.pruning_layer
        self.counts = target.device.type == "cpu"

    @property
    def replays(self) -> bool:
        return self.cap is not None or not self.counts

    def visit(self, rows: Rows) -> AbstractContextManager[Rows]:
        if rows.trees is not None and len(rows.trees) == 1:
            width = rows.trees.width
            cap = min(self.cap or (width if self.counts else -(-width // 2)), width)
            if cap < width or (self.counts and self.threshold > 0):
                nodes = survivors(rows.trees, self.transitions(rows), self.threshold, cap)
                if cap == width:  # as many as reach the threshold
                    nodes, rows.repeats = nodes[:, : int((nodes >= 0).sum())], False
                if nodes.shape[1] < width:
                    rows.keep(nodes, self.layer)
        return nullcontext(rows)

    def transitions(self, rows: Rows) -> torch.Tensor:
        """(B, N) probabilities of each node given its parent, from the states at this layer."""
        trees = rows.trees
        logits = self.target.logits(self.speculator.early_exit(rows.hidden[:, : trees.width]))
        each = torch.arange(len(trees), device=logits.device)[:, None]
        return logits.float().softmax(-1)[each, trees.parents_or_root, trees.tokens]


def _wider(texts: torch.Tensor, width: int) -> torch.Tensor:
    """(B, T) texts with room for so many tokens."""
    return F.pad(texts, (0, width - texts.shape[1]), value=-1)
