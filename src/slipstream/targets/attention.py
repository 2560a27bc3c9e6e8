"""Streams that attend only to what their main row attends to most (Speculative Streaming, H.1).

sdpa returns no weights, so the main rows' scores are computed beside it; their order is all that is
needed. It works on what every family hands to its attention function, after norms and rotation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from slipstream.targets.target import Rows, Target

NAME = "slipstream_limited"
_limit: ContextVar[tuple[Rows, int]] = ContextVar("limit")


@contextmanager
def limited_attention(target: Target, rows: Rows, attended: int) -> Iterator[None]:
    """Within, streams of `rows` see at most the `attended` tokens that their main row scores
    highest, per layer and head, beside themselves."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, attention_mask, **options):
        limit_rows, count = _limit.get()
        mask = limit_streams(attention_mask, query, key, limit_rows, count)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    config, token = target.model.config, _limit.set((rows, attended))
    usual = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        _limit.reset(token)


@torch.no_grad()
def limit_streams(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, rows: Rows, attended: int
) -> torch.Tensor:
    """A mask for each head, (B, H, R, K), from the one for all, (B, 1, R, K).

    query: (B, H, R, D_head); key: (B, H_kv, K, D_head), the R rows last, the streams among them
    last of all.
    """
    nodes, main = rows.num_nodes, key.shape[2] - rows.num_stream_rows
    owners = rows.owners.clamp(min=0).expand(len(query), -1)
    places = owners[:, None, :, None]
    asking = query.gather(2, places.expand(-1, query.shape[1], -1, query.shape[3]))
    asking = asking.unflatten(1, (key.shape[1], -1))
    scores = (asking @ key[:, :, None, :main].transpose(-1, -2)).flatten(1, 2)
    visible = mask[:, :, :nodes, :main].expand(len(query), -1, -1, -1)
    visible = visible.gather(2, places.expand(-1, 1, -1, main))
    scores = scores.masked_fill(~visible, -torch.inf)
    best = scores.topk(min(attended, main), dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    each = rows.num_stream_rows // owners.shape[1]
    streams = mask[:, :, nodes:].expand(-1, query.shape[1], -1, -1)
    streams = torch.cat(
        [streams[..., :main] & chosen.repeat_interleave(each, dim=2), streams[..., main:]], -1
    )
    return torch.cat([mask[:, :, :nodes].expand(len(query), query.shape[1], -1, -1), streams], 2)
