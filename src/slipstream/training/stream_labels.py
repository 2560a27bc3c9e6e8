"""Which positions carry streams, and what each stream should predict.

Pure tensor functions; they know nothing of models or Lightning.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.data.batches import Batch

NO_LABEL = -100


@dataclass
class StreamLabels:
    """positions: (B, P) rows that carry streams, padded with 0; next_tokens: (B, P) what the main
    row predicts; tokens: (B, P, gamma) what each stream predicts; `NO_LABEL` for none."""

    positions: torch.Tensor
    next_tokens: torch.Tensor
    tokens: torch.Tensor


def stream_labels(batch: Batch, num_streams: int) -> StreamLabels:
    """Rows from which completion tokens are predicted (the last prompt token and after) carry
    streams; stream j at row t predicts token t + 1 + j, if it is of the same completion.

    Example: ids [5, 6, 7, 8] with 7 and 8 supervised, two streams: positions [1, 2], next tokens
    [7, 8], stream tokens [[8, none], [none, none]].
    """
    predicts = F.pad(batch.supervised[:, 1:], (0, 1))
    count = int(predicts.sum(1).max())
    order = predicts.int().argsort(dim=1, descending=True, stable=True)[:, :count]
    valid = predicts.gather(1, order)
    positions = torch.where(valid, order, 0)
    supervised = torch.where(batch.supervised, batch.ids, NO_LABEL)
    padded = F.pad(supervised, (0, num_streams + 1), value=NO_LABEL)
    offsets = torch.arange(1, num_streams + 2, device=positions.device)
    places = (positions.unsqueeze(-1) + offsets).flatten(1)
    labels = padded.gather(1, places).view(*positions.shape, num_streams + 1)
    ended = (labels == NO_LABEL).cumsum(-1) > 0  # no stream looks beyond the end of its answer
    labels = labels.masked_fill(ended | ~valid.unsqueeze(-1), NO_LABEL)
    return StreamLabels(positions, labels[..., 0], labels[..., 1:])
