"""The tree engine: draft trees, verify them in one forward, keep the accepted paths, go on.

It knows the drafter protocol and no concrete drafter.
"""

import torch

from slipstream.core.cache import StepCache
from slipstream.core.clock import Clock
from slipstream.core.errors import InputError
from slipstream.core.masks import tree_mask
from slipstream.core.sampling import Sampling
from slipstream.core.tree import DraftTree
from slipstream.core.verification import Verdict, verify_greedy, verify_sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder, Line
from slipstream.drafters.base import Context, Drafter, Step
from slipstream.targets.target import Rows, Target


class Engine(Decoder):
    """Speculative decoding of `target` with `drafter`; budget: nodes of a tree, root included."""

    def __init__(
        self, target: Target, drafter: Drafter, sampling: Sampling, limits: Limits, budget: int
    ):
        if budget < 1:
            raise InputError("engine.budget: a tree needs at least 1 node")
        super().__init__(drafter.bind(target), sampling, limits)
        self.drafter, self.budget = drafter, budget

    @property
    def exact(self) -> bool:
        return self.drafter.exact

    @property
    def visitors(self):
        return self.drafter.visitors

    def _extra_rows(self) -> int:
        return self.budget + self.drafter.extra_rows(self.budget)

    def _begin(self, contexts: list[Context]) -> None:
        self.drafter.begin(contexts)

    def _leave(self, kept: list[int]) -> None:
        self.drafter.leave(kept)

    def _first(self, line, part, token, rows, logits, place) -> None:
        path = list(range(len(part)))
        self._decide(line, Step(DraftTree.chain(part), path, token, rows, logits, place), [])

    def _step(self, lines: list[Line], cache: StepCache, clock: Clock) -> None:
        """Draft, verify, commit."""
        contexts = [line.context for line in lines]
        for line in lines:
            line.context.max_depth = line.answer.room - len(line.answer.ids) - 1
        trees = self.drafter.propose(contexts, self.budget)
        with clock.share("verify"):
            rows = self._forward(trees, cache)
            if rows.kept is not None:
                trees = [tree.keep(rows.kept) for tree in trees]
            logits = self.target.logits(rows.hidden[:, : rows.num_nodes])
        verdicts = self._verify(trees, logits, contexts)
        self._commit(cache, [verdict.path for verdict in verdicts], rows)
        for place, (line, tree, verdict) in enumerate(zip(lines, trees, verdicts, strict=True)):
            own = logits[place, : len(tree)]
            step = Step(tree, verdict.path, verdict.next_token, rows, own, place)
            self._decide(line, step, [tree.tokens[node] for node in verdict.path[1:]])

    def _forward(self, trees: list[DraftTree], cache: StepCache) -> Rows:
        """All trees in one forward; shorter ones are padded with rows that nothing sees."""
        width, device = max(map(len, trees)), self.target.device
        if self.target.compiled is not None:
            width = self.budget
        ids = [tree.tokens + [0] * (width - len(tree)) for tree in trees]
        depths = [tree.depths() + [0] * (width - len(tree)) for tree in trees]
        ancestors = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
        for place, tree in enumerate(trees):
            ancestors[place, : len(tree), : len(tree)] = tree.ancestor_mask()
        lengths = torch.tensor(cache.lengths, device=device)[:, None]
        return self.target.forward(
            torch.tensor(ids, device=device),
            torch.tensor(depths, device=device) + lengths,
            tree_mask(cache.lengths, ancestors.to(device), cache.slots),
            cache,
            self.drafter.visitors,
            repeats=True,
        )

    def _verify(
        self, trees: list[DraftTree], logits: torch.Tensor, contexts: list[Context]
    ) -> list[Verdict]:
        """logits: (B, N, V), those of padding rows included."""
        if self.sampling.greedy:
            choices = logits.argmax(-1).tolist()
            return [verify_greedy(*pair) for pair in zip(trees, choices, strict=True)]
        # On the host, in one transfer: the walk down the tree looks at single probabilities.
        probabilities = self.sampling.probabilities(logits).cpu()
        return [
            verify_sampling(tree, each[: len(tree)], context.randomness)
            for tree, each, context in zip(trees, probabilities, contexts, strict=True)
        ]

    def _commit(self, cache: StepCache, paths: list[list[int]], rows: Rows) -> None:
        """Keep the accepted paths; layers before the pruning still hold the pruned nodes."""
        if rows.kept is None:
            return cache.commit_each(paths)
        (path,) = paths
        below, above = range(rows.kept_from), range(rows.kept_from, self.target.num_layers)
        cache.commit([(below, [rows.kept[node] for node in path]), (above, path)])

    def _decide(self, line: Line, step: Step, drafted: list[int]) -> None:
        """Emit the accepted tokens and the next one, and tell the drafter."""
        for token in drafted:
            line.answer.emit(token, drafted=True)
        line.answer.emit(step.next_token, drafted=False)
        line.context.tokens += [*drafted, step.next_token]
        if line.answer.finished is None:
            self.drafter.observe(line.context, step)
