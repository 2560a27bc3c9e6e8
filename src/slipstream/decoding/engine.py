"""The tree engine: draft a tree, verify it in one forward, keep the accepted path, go on.

It knows the drafter protocol and no concrete drafter. One prompt at a time.
"""

import time

import torch

from slipstream.core.cache import StepCache
from slipstream.core.errors import InputError
from slipstream.core.masks import tree_mask
from slipstream.core.sampling import Sampling, SeededRandomness
from slipstream.core.tree import DraftTree
from slipstream.core.verification import Verdict, verify_greedy, verify_sampling
from slipstream.decoding.answer import Answer, Generation, Limits, TokenCallback
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.base import Context, Drafter, Step
from slipstream.targets.target import Rows, Target


class Engine:
    """Speculative decoding of `target` with `drafter`; budget: nodes of a tree, root included."""

    def __init__(
        self, target: Target, drafter: Drafter, sampling: Sampling, limits: Limits, budget: int
    ):
        if budget < 1:
            raise InputError("engine.budget: a tree needs at least 1 node")
        self.target, self.drafter = drafter.bind(target), drafter
        self.sampling, self.limits, self.budget = sampling, limits, budget

    @property
    def exact(self) -> bool:
        return self.drafter.exact

    @torch.inference_mode()
    def generate(
        self, prompt_ids: list[int], seed: int = 0, callback: TokenCallback | None = None
    ) -> Generation:
        """Answer `prompt_ids`; raises `InputError` for a prompt beyond the target's context."""
        started, target = time.perf_counter(), self.target
        room = self.limits.check_prompt(target, prompt_ids)
        answer = Answer(target, self.limits, room, callback)
        extra = self.drafter.extra_rows(self.budget)
        cache = target.new_cache(len(prompt_ids) + room + self.budget + extra)
        context = Context(list(prompt_ids), cache, self.sampling, SeededRandomness(seed))
        self.drafter.begin(context)
        self._prefill(context, answer)
        forwards = 0
        while answer.finished is None:
            forwards += 1
            self._step(context, answer)
        statistics = Statistics(
            1,
            len(answer.ids),
            forwards,
            time.perf_counter() - started,
            dict(context.clock.seconds),
        )
        return Generation(answer.ids, answer.text(), answer.finished, statistics)

    def _prefill(self, context: Context, answer: Answer) -> None:
        """Run the prompt and decide the first token."""
        target, prompt = self.target, DraftTree.chain(context.tokens)
        ids = torch.tensor([prompt.tokens], device=target.device)
        positions = torch.arange(len(prompt), device=target.device)[None]
        with context.clock.share("prefill"):
            rows = target.forward(ids, positions, None, context.cache, self.drafter.visitors)
            logits = target.logits(rows.hidden[0, len(prompt) - 1 : len(prompt)])
        first = self._verify(DraftTree.chain(prompt.tokens[-1:]), logits, context).next_token
        path = list(range(len(prompt)))
        context.cache.commit([(range(target.num_layers), path)])
        self._decide(context, answer, [], Step(prompt, path, first, rows, logits))

    def _step(self, context: Context, answer: Answer) -> None:
        """Draft, verify, commit."""
        target, cache = self.target, context.cache
        context.max_depth = answer.room - len(answer.ids) - 1
        tree = self.drafter.propose(context, self.budget)
        device = target.device
        ids = torch.tensor([tree.tokens], device=device)
        positions = torch.tensor([tree.depths()], device=device) + cache.length
        mask = tree_mask(cache.length, tree.ancestor_mask().to(device))[None, None]
        with context.clock.share("verify"):
            rows = target.forward(ids, positions, mask, cache, self.drafter.visitors)
            if rows.kept is not None:
                tree = tree.keep(rows.kept)
            logits = target.logits(rows.hidden[0, : len(tree)])
        verdict = self._verify(tree, logits, context)
        self._commit(cache, verdict.path, rows)
        drafted = [tree.tokens[node] for node in verdict.path[1:]]
        step = Step(tree, verdict.path, verdict.next_token, rows, logits)
        self._decide(context, answer, drafted, step)

    def _verify(self, tree: DraftTree, logits: torch.Tensor, context: Context) -> Verdict:
        if self.sampling.greedy:
            return verify_greedy(tree, logits.argmax(-1).tolist())
        # On the host, in one transfer: the walk down the tree looks at single probabilities.
        probabilities = self.sampling.probabilities(logits).cpu()
        return verify_sampling(tree, probabilities, context.randomness)

    def _commit(self, cache: StepCache, path: list[int], rows: Rows) -> None:
        """Keep the accepted path; layers before the pruning still hold the pruned nodes."""
        layers = self.target.num_layers
        if rows.kept is None:
            cache.commit([(range(layers), path)])
        else:
            below = range(rows.kept_from)
            above = range(below.stop, layers)
            cache.commit([(below, [rows.kept[node] for node in path]), (above, path)])

    def _decide(self, context: Context, answer: Answer, drafted: list[int], step: Step) -> None:
        """Emit the accepted tokens and the next one, and tell the drafter."""
        for token in drafted:
            answer.emit(token, drafted=True)
        answer.emit(step.next_token, drafted=False)
        context.tokens += [*drafted, step.next_token]
        if answer.finished is None:
            self.drafter.observe(context, step)
