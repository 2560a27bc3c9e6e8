"""Boolean attention masks: rows of a forward against committed positions and rows of the forward.

True means "may attend". Columns are cache slots: first the committed tokens, then the rows of this
forward in order. Masks come from positions and parents alone; nothing here knows a model.
"""

import torch


def tree_mask(ancestors: torch.Tensor, slots: int, ends: torch.Tensor | None) -> torch.Tensor:
    """(B, 1, N, slots + N): every node sees its sequence's committed tokens, its ancestors and
    itself.

    ancestors: (B, N, N) of `Trees`; slots: columns before those of the nodes; ends: (B,), how many
    of them each sequence has committed, None for all.

    >>> tree_mask(torch.ones(2, 1, 1, dtype=torch.bool), 2, torch.tensor([2, 1])).int().tolist()
    [[[[1, 1, 1]]], [[[1, 0, 1]]]]
    """
    if ends is None:
        before = ancestors.new_ones(1, 1, slots)
    else:
        before = torch.arange(slots, device=ancestors.device) < ends[:, None, None]
    return torch.cat([before.expand(*ancestors.shape[:2], -1), ancestors], -1)[:, None]


def causal_mask(length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """(length, length): row i sees rows 0..i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def window_mask(slots: int, positions: torch.Tensor, window: int) -> torch.Tensor:
    """(B, 1, R, slots + R): which of the slots before the rows, in the order of their positions,
    and of the rows lie less than `window` positions behind each of R rows.

    positions: (B, R) of the rows.

    >>> window_mask(2, torch.tensor([[2]]), 2).int().tolist()
    [[[[0, 1, 1]]]]
    """
    before = torch.arange(slots, device=positions.device).expand(len(positions), -1)
    seen = torch.cat([before, positions], 1)
    return (positions[:, None, :, None] - seen[:, None, None, :]) < window


def stream_mask(main_mask: torch.Tensor, num_streams: int) -> torch.Tensor:
    """Mask of stream rows (Speculative Streaming, Eq. 2).

    main_mask: (..., P, K), what the main row of each of P positions sees. Stream (t, j) sees what
    its main row sees, and the streams (t, i) with i <= j; stream rows are ordered position by
    position. Returns (..., P * gamma, K + P * gamma).

    >>> stream_mask(torch.tensor([[True, False]]), 2).int().tolist()
    [[1, 0, 1, 0], [1, 0, 1, 1]]
    """
    positions = main_mask.shape[-2]
    main = main_mask.repeat_interleave(num_streams, dim=-2)
    rows = torch.arange(positions * num_streams, device=main.device)
    own = (rows[:, None] // num_streams == rows // num_streams) & (rows[:, None] >= rows)
    own = own.expand(*main.shape[:-2], *own.shape)
    return torch.cat([main, own], dim=-1)


def own_streams(chosen: torch.Tensor, num_rows: int, num_streams: int) -> torch.Tensor:
    """Which stream rows belong to which main row: what Eq. 3 adds to a main row's view.

    chosen: (B, P), the rows that carry streams, -1 for none. Returns (B, num_rows, P * gamma).

    >>> own_streams(torch.tensor([[1, -1]]), 2, 2).int().tolist()
    [[[0, 0, 0, 0], [1, 1, 0, 0]]]
    """
    rows = torch.arange(num_rows, device=chosen.device)
    owners = rows[:, None] == chosen[:, None, :]
    return owners.repeat_interleave(num_streams, dim=-1)
