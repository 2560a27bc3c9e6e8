"""The tree engine: draft trees, verify them in one forward, keep the accepted paths, go on.

It knows the drafter protocol and no concrete drafter.
"""

from collections.abc import Sequence

import torch

from slipstream.core.cache import StepCache
from slipstream.core.clock import Clock
from slipstream.core.errors import InputError
from slipstream.core.masks import tree_mask
from slipstream.core.sampling import Sampling
from slipstream.core.transfer import on_device, on_host
from slipstream.core.tree import DraftTree
from slipstream.core.verification import Verdict, last_accepted, verify_greedy, verify_sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder, Line
from slipstream.drafters.base import Context, Drafter, Outlook, Step
from slipstream.targets.compiled import compile_like
from slipstream.targets.target import Rows, Target


class Engine(Decoder):
    """Speculative decoding of `target` with `drafter`; budget: nodes of a tree, root included."""

    def __init__(
        self, target: Target, drafter: Drafter, sampling: Sampling, limits: Limits, budget: int
    ):
        if budget < 1:
            raise InputError("engine.budget: a tree needs at least 1 node")
        super().__init__(drafter.bind(target), sampling, limits)
        compile_like(self.target, target)
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
        self.drafter.begin(contexts, self.budget)

    def _leave(self, kept: list[int]) -> None:
        self.drafter.leave(kept)

    def _first(self, lines, firsts, start, rows, ids) -> None:
        last, tokens = [0] * len(lines), [0] * len(lines)
        for first in firsts:
            last[first.place], tokens[first.place] = len(first.part) - 1, first.token
        paths = [list(range(end + 1)) for end in last]
        cache = lines[0].context.cache
        outlook = _committed_outlook(cache, rows, ids, [start] * len(lines), paths, tokens)
        contexts = [line.context for line in lines]
        foreseen = on_host(*self.drafter.foresee(contexts, outlook))
        for first in firsts:
            tree, place = DraftTree.chain(first.part), first.place
            own = tuple(tensor[place] for tensor in foreseen)
            step = Step(tree, paths[place], first.token, rows, first.logits, place, own)
            self._decide(lines[place], step, [])

    def _step(self, lines: list[Line], cache: StepCache, clock: Clock) -> None:
        """Draft, verify, commit."""
        contexts = [line.context for line in lines]
        for line in lines:
            line.context.max_depth = line.answer.room - len(line.answer.ids) - 1
        trees = self.drafter.propose(contexts, self.budget)
        proposed = list(map(len, trees))
        with clock.share("verify"):
            nodes = _Nodes(trees, self._width(trees), self.target.device)
            rows = self._forward(nodes, cache)
            logits = self.target.logits(rows.hidden[:, : rows.num_nodes])
        if self.sampling.greedy and rows.kept is None:
            with clock.share("verify"):
                verdicts, foreseen = self._verify_ahead(trees, nodes, rows, logits, contexts)
            self._commit(cache, [verdict.path for verdict in verdicts], rows)
        else:
            if rows.kept is not None:
                trees = [tree.keep(rows.kept) for tree in trees]
                nodes.ids = nodes.ids[:, rows.kept]
            with clock.share("verify"):
                verdicts = self._verify(trees, logits, contexts)
            self._commit(cache, [verdict.path for verdict in verdicts], rows)
            starts = [len(context.tokens) - 1 for context in contexts]
            paths, tokens = zip(*((each.path, each.next_token) for each in verdicts), strict=True)
            outlook = _committed_outlook(cache, rows, nodes.ids, starts, paths, tokens, logits)
            foreseen = on_host(*self.drafter.foresee(contexts, outlook))
        for place, (line, tree, verdict) in enumerate(zip(lines, trees, verdicts, strict=True)):
            line.count(proposed[place])
            line.accepted.append(len(verdict.path) - 1)
            own = tuple(tensor[place] for tensor in foreseen)
            scores = logits[place, : len(tree)]
            step = Step(tree, verdict.path, verdict.next_token, rows, scores, place, own)
            self._decide(line, step, [tree.tokens[node] for node in verdict.path[1:]])

    def _width(self, trees: list[DraftTree]) -> int:
        """Rows of each tree; shorter ones are padded with rows that nothing sees."""
        return max(map(len, trees)) if self.target.compiled is None else self.budget

    def _forward(self, nodes: "_Nodes", cache: StepCache) -> Rows:
        """All trees in one forward."""
        lengths = on_device(cache.lengths, self.target.device)[:, None]
        return self.target.forward(
            nodes.ids,
            # Nodes beyond the context's end (riders may be) are never emitted.
            (nodes.depths + lengths).clamp(max=self.target.max_positions - 1),
            tree_mask(cache.lengths, nodes.ancestors, cache.slots),
            cache,
            self.drafter.visitors,
            repeats=True,
        )

    def _verify_ahead(
        self,
        trees: list[DraftTree],
        nodes: "_Nodes",
        rows: Rows,
        logits: torch.Tensor,
        contexts: list[Context],
    ) -> tuple[list[Verdict], list[torch.Tensor]]:
        """Greedy verdicts; the drafter is asked to foresee before the host waits for them, with
        accepted rows still staged where the forward put them."""
        choices = logits.argmax(-1)
        last = last_accepted(nodes.ids, nodes.parents, nodes.ancestors, choices)
        slots, count = contexts[0].cache.slots, nodes.ids.shape[1]
        each = torch.arange(len(trees), device=last.device)
        before = torch.arange(slots, device=last.device).expand(len(trees), -1)
        outlook = Outlook(
            rows,
            nodes.ids,
            [len(context.tokens) - 1 for context in contexts],
            nodes.ancestors[each, last],
            last,
            choices[each, last],
            rows.mask[each, 0, last, : slots + count],
            torch.cat([before, rows.positions[:, :count]], dim=1),
            logits,
        )
        choices, *foreseen = on_host(choices, *self.drafter.foresee(contexts, outlook))
        return [
            verify_greedy(*pair) for pair in zip(trees, choices.tolist(), strict=True)
        ], foreseen

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


class _Nodes:
    """Trees as tensors on a device, padded to `width` with nodes that see themselves alone.

    ids, depths, parents: (B, width); ancestors: (B, width, width).
    """

    def __init__(self, trees: list[DraftTree], width: int, device: torch.device):
        ancestors = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
        columns = []
        for place, tree in enumerate(trees):
            ancestors[place, : len(tree), : len(tree)] = tree.ancestor_mask()
            missing = width - len(tree)
            own = (tree.tokens, 0), (tree.depths(), 0), (tree.parents, -1)
            columns.append([values + [fill] * missing for values, fill in own])
        self.ids, self.depths, self.parents = on_device(columns, device).unbind(1)
        self.ancestors = on_device(ancestors, device)


def _committed_outlook(
    cache: StepCache,
    rows: Rows,
    ids: torch.Tensor,
    starts: list[int],
    paths: Sequence[list[int]],
    tokens: Sequence[int],
    logits: torch.Tensor | None = None,
) -> Outlook:
    """What is to be foreseen once the accepted paths are known and committed."""
    device = ids.device
    accepted = [[node in path for node in range(ids.shape[1])] for path in map(set, paths)]
    ends = on_device(cache.lengths, device)[:, None]
    return Outlook(
        rows,
        ids,
        starts,
        on_device(accepted, device),
        on_device([path[-1] for path in paths], device),
        on_device(list(tokens), device),
        torch.arange(cache.slots, device=device) < ends,
        logits=logits,
    )
