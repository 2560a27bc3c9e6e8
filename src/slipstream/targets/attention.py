"""The attention of a target's layers, as transformers' registry takes it.

Query heads that share keys are treated as rows of one head, so that keys and values are read once
and never copied. Streams may be limited to what their main row attends to most (Speculative
Streaming, H.1): sdpa returns no weights, so the main rows' scores are computed beside it; their
order is all that is needed. It works on what every family hands over, after norms and rotation.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial

import torch
import torch.nn.functional as F

from slipstream.targets.rows import Rows

NAME = "slipstream"
ALIGNED = 8
"""Kernels want the rows of a mask a multiple of so many numbers apart. Here they are always further
apart than they are long, for compiled code would tell the two cases apart."""
KEPT_AS = "_attn_implementation_internal"
"""The attribute of a config that `_attn_implementation` is kept as. The setter checks the config
for longer than several operations of a step take."""
LIMIT: ContextVar[tuple[Rows, int] | None] = ContextVar("limit", default=None)
"""Streams of these rows see at most so many tokens, those that their main row scores highest, per
layer and head, beside themselves."""


def our_attention(config) -> AbstractContextManager[None]:
    """Within, layers of a model with this config run `attend`."""
    limit = LIMIT.get()
    if limit is None and config._attn_implementation == NAME:
        return nullcontext()
    return _attention_set(config, limit)


@contextmanager
def _attention_set(config, limit: tuple[Rows, int] | None) -> Iterator[None]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_MASK_ATTENTION_FUNCTIONS:  # for another thread, in the model's own forward
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    settings = vars(config)
    usual = settings[KEPT_AS]
    before = ALL_ATTENTION_FUNCTIONS.get(NAME, attend)
    ALL_ATTENTION_FUNCTIONS.register(NAME, partial(attend, limit=limit) if limit else attend)
    settings[KEPT_AS] = NAME
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, before)
        settings[KEPT_AS] = usual


def added(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as `attend` takes it, so that it is made once and not in every layer:
    (B, 1 or H, R, K) -> (B, 1 or H_kv, groups * R, K), what is added to scores.

    Its numbers are those that autocast would make of it, and its rows are as far apart as kernels
    want them: else each layer would copy it, and training keep the copies.

    >>> added(torch.tensor([[[[True, False]]]]), 2, torch.float32).tolist()
    [[[[0.0, -inf], [0.0, -inf]]]]
    """
    hidden = ~(mask.unflatten(1, (-1, groups)) if mask.shape[1] > 1 else mask[:, :, None])
    *shape, slots = hidden.shape
    shape[2], room = groups, (slots // ALIGNED + 1) * ALIGNED
    numbers = torch.zeros(*shape, room, dtype=_computed(dtype, mask.device), device=mask.device)
    return numbers[..., :slots].masked_fill_(hidden, -torch.inf).flatten(2, 3)


def _computed(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What attention computes in, given queries of `dtype`: autocast may choose another one."""
    kind = device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts and dtype != torch.float64 else dtype


def attend(
    module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    limit: tuple[Rows, int] | None = None,
    **options,
) -> tuple[torch.Tensor, None]:
    """query: (B, H, R, D_head); key, value: (B, H_kv, K, D_head); attention_mask: of `added`, or
    None for causal; limit: of `LIMIT`. Returns (B, R, H, D_head)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mask, shared, rows = attention_mask, key.shape[1], query.shape[2]
    if mask is not None and mask.dtype == torch.bool:  # of another thread, as above
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)
    groups = query.shape[1] // shared
    if limit is not None and mask is not None:
        visible = limit_streams(mask[:, :, :rows] == 0, query, key, *limit)
        mask = added(visible, groups, query.dtype)
    elif mask is not None:
        mask = mask.to(_computed(query.dtype, query.device))  # which it is, as a rule
    if groups == 1 or (mask is None and rows > 1):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)
    query = query.unflatten(1, (shared, groups)).flatten(2, 3)
    found = F.scaled_dot_product_attention(query, key, value, mask, scale=options.get("scaling"))
    return found.unflatten(2, (groups, rows)).flatten(1, 2).transpose(1, 2).contiguous(), None


@torch.no_grad()
def limit_streams(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, rows: Rows, attended: int
) -> torch.Tensor:
    """A mask for each head, (B, H, R, K), from the one for all, (B, 1, R, K).

    query: (B, H, R, D_head); key: (B, H_kv, K, D_head), the R rows last, the streams among them
    last of all.
    """
    nodes, main = rows.num_nodes, key.shape[2] - rows.num_stream_rows
    limited = mask.expand(len(query), query.shape[1], -1, -1).clone()
    owners = rows.owners.to(query.device).clamp(min=0).expand(len(query), -1)
    places = owners[:, None, :, None]
    asking = query.gather(2, places.expand(-1, query.shape[1], -1, query.shape[3]))
    asking = asking.unflatten(1, (key.shape[1], -1))
    scores = (asking @ key[:, :, None, :main].transpose(-1, -2)).flatten(1, 2)
    visible = limited[:, :1, :nodes, :main].gather(2, places.expand(-1, 1, -1, main))
    scores = scores.masked_fill(~visible, -torch.inf)
    best = scores.topk(min(attended, main), dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    each = rows.num_stream_rows // owners.shape[1]
    limited[:, :, nodes:, :main] &= chosen.repeat_interleave(each, dim=2)
    return limited
