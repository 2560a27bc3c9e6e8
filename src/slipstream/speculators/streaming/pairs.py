"""What the token before it says about a token: additions to the logits of streams.

The streams of one tree do not know each other's tokens, so a stream proposes the same children
under every parent. Scores of pairs tell the coherent branches from the others. Both kinds are
additions of this project to Speculative Streaming.
"""

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.speculators.losses import in_slices
from slipstream.targets.target import Target


class Transitions(nn.Module):
    """Low-rank scores of pairs: what a token adds to the logits of the one after it.

    From the target's embeddings of both, at unit size whatever theirs is; zero at first.
    """

    def __init__(self, embedding_size: int, rank: int):
        super().__init__()
        self.parent = nn.Parameter(torch.empty(rank, embedding_size))
        self.child = nn.Parameter(torch.zeros(rank, embedding_size))
        nn.init.normal_(self.parent, std=embedding_size**-0.5)

    def add_to(
        self, logits: torch.Tensor, target: Target, parents: torch.Tensor, children: torch.Tensor
    ) -> torch.Tensor:
        """Add to (M, V) logits, in place, the scores of what may follow (M,) parents; children: of
        `pair_tables`."""
        queries = F.linear(normed_embeddings(target, parents), self.parent)
        return logits.addmm_(queries, children.to(queries.dtype).t())


class CopyScores(nn.Module):
    """What a token gains where the text so far has it after the same parent.

    The gain is a sum of three learned terms: of the stream (2 at first, which is of use before any
    training), of the parent and of the child (both 0 at first).
    """

    def __init__(self, embedding_size: int, num_streams: int):
        super().__init__()
        self.stream = nn.Parameter(torch.full((num_streams,), 2.0))
        self.parent = nn.Parameter(torch.zeros(embedding_size))
        self.child = nn.Parameter(torch.zeros(embedding_size))

    def add_to(
        self,
        logits: torch.Tensor,
        of_parent: torch.Tensor,
        of_child: torch.Tensor,
        streams: torch.Tensor,
        parents: torch.Tensor,
        texts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """Add the gains to (M, V) logits of stream rows, in place.

        of_parent, of_child: (V,) of `pair_tables`; streams: (M,) number of each row's stream,
        from 0; parents: (M,) the token before its own; texts: (M, T) and lengths: (M,), the tokens
        known when it runs, the root the last of them.
        """
        known = torch.arange(1, texts.shape[1], device=texts.device) < lengths[:, None]
        row, place = ((texts[:, :-1] == parents[:, None]) & known).nonzero(as_tuple=True)
        pairs = (row * logits.shape[1] + texts[row, place + 1]).unique()
        row, child = pairs // logits.shape[1], pairs % logits.shape[1]
        gains = self.stream[streams[row]] + of_parent[parents[row]] + of_child[child]
        return logits.index_put_((row, child), gains.to(logits.dtype), accumulate=True)


def pair_tables(
    target: Target, transitions: Transitions | None, copying: CopyScores | None
) -> tuple[torch.Tensor, ...]:
    """What scores of pairs need to know of every token: (V, rank) as a child of `transitions`,
    (V, 1) as a parent and as a child of `copying`; nothing of what is None. At least float32, in
    which the gradients of a token's many occurrences are summed."""
    directions = [] if transitions is None else [transitions.child]
    if copying is not None:
        directions += [copying.parent[None], copying.child[None]]
    if not directions:
        return ()
    return vocabulary_table(target, torch.cat(directions)).split(list(map(len, directions)), 1)


class PairScores:
    """The scores of a trained speculator for drafting, with all that depends on one token alone
    looked up in tables."""

    @torch.no_grad()
    def __init__(self, target: Target, transitions: Transitions | None, copying: CopyScores | None):
        self.transitions = self.copying = None
        tables = pair_tables(target, transitions, copying)
        if transitions is not None:
            self.transitions = vocabulary_table(target, transitions.parent), tables[0]
        if copying is not None:
            self.copying = copying.stream, *(table[:, 0] for table in tables[-2:])

    def __call__(
        self, parents: torch.Tensor, children: torch.Tensor, texts: torch.Tensor, first: int = 0
    ) -> torch.Tensor:
        """(B, levels, P) parents and (B, levels, C) children -> (B, levels, P, C) scores, at least
        float32.

        texts: (B, T), all tokens up to the root, -1 for none; first: the first of the levels.
        """
        scores = torch.zeros(*parents.shape, children.shape[-1], device=parents.device)
        if self.transitions is not None:
            queries, keys = self.transitions
            scores = scores + queries[parents] @ keys[children].transpose(-1, -2)
        if self.copying is not None:
            stream, of_parent, of_child = self.copying
            streams = stream[first : first + parents.shape[1]]
            gains = streams[:, None, None] + of_parent[parents].unsqueeze(-1)
            gains = gains + of_child[children].unsqueeze(-2)
            scores = scores + followed(texts, parents, children) * gains
        return scores


def followed(texts: torch.Tensor, parents: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
    """Whether a parent is followed by a child anywhere in the (B, T) texts.

    (B, ..., P) parents and (B, ..., C) children -> (B, ..., P, C) bool.

    >>> followed(torch.tensor([[5, 6, 5, 7]]), torch.tensor([[5, 7]]), torch.tensor([[6, 7, 5]]))
    tensor([[[ True,  True, False],
             [False, False, False]]])
    """
    texts = texts.view(len(texts), *[1] * (parents.ndim - 1), -1)
    here = parents.unsqueeze(-1) == texts[..., :-1]
    there = children.unsqueeze(-1) == texts[..., 1:]
    return (here.float() @ there.float().transpose(-1, -2)) > 0


def normed_embeddings(target: Target, tokens: torch.Tensor) -> torch.Tensor:
    """(...) tokens -> (..., E) embeddings of unit size, whatever the target's are."""
    embeddings = target.token_embeddings(tokens)
    return F.rms_norm(embeddings, embeddings.shape[-1:], eps=_least(embeddings))


def vocabulary_table(target: Target, directions: torch.Tensor) -> torch.Tensor:
    """(r, E) directions -> (V, r), their products with each token's unit-size embedding; at least
    float32. Scaling to unit size comes after the product, which is narrower. No second embedding
    table is held; where the target has none, embeddings are computed a slice at a time."""

    def scales(embeddings: torch.Tensor) -> tuple[torch.Tensor]:
        kind = torch.promote_types(embeddings.dtype, torch.float32)
        sizes = torch.linalg.vector_norm(embeddings, dim=-1, keepdim=True, dtype=kind)
        return ((sizes.square() / embeddings.shape[-1] + _least(embeddings)).rsqrt(),)

    def of_slice(tokens: torch.Tensor) -> tuple[torch.Tensor]:
        embeddings = target.token_embeddings(tokens)
        return (F.linear(embeddings, directions) * scales(embeddings)[0],)

    width, table = target.embedding_size, target.embedding_table
    if table is None:
        tokens = torch.arange(target.vocab_size, device=target.device)
        return in_slices(of_slice, width, tokens)[0]
    with torch.no_grad():
        sizes = in_slices(scales, width, table)[0]
    with torch.autocast(table.device.type, enabled=False):  # which may copy the table
        return F.linear(table, directions.to(table.dtype)) * sizes


def _least(embeddings: torch.Tensor) -> float:
    """What is added to mean squares that are divided by: bfloat16's own is more than those of most
    embeddings."""
    return torch.finfo(torch.promote_types(embeddings.dtype, torch.float32)).eps
