"""The loss of a few rows at a time against `F.cross_entropy` on all logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.speculators import losses as head_losses
from slipstream.speculators.losses import head_loss


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("most_logits", [1, 120, 320, 360])
def test_values_gradients_and_guesses(bias, most_logits, monkeypatch):
    monkeypatch.setattr(head_losses, "SLICE_BYTES", {"cpu": 4 * most_logits})
    torch.manual_seed(0)
    head = nn.Linear(6, 40, bias=bias).double().requires_grad_(False)
    hidden = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    labels, outer = torch.randint(0, 40, (9,)), torch.rand(9, dtype=torch.float64)
    logits = head(hidden)
    expected = F.cross_entropy(logits, labels, reduction="none")
    (gradient,) = torch.autograd.grad((expected * outer).sum(), hidden)
    losses, guesses = head_loss(head, hidden, labels)
    (found,) = torch.autograd.grad((losses * outer).sum(), hidden)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)
    assert guesses.tolist() == logits.argmax(-1).tolist()


def test_a_head_that_is_trained_gets_its_gradient(monkeypatch):
    monkeypatch.setattr(head_losses, "SLICE_BYTES", {"cpu": 320})
    torch.manual_seed(0)
    head = nn.Linear(6, 40)
    hidden, labels = torch.randn(3, 6), torch.tensor([1, 2, 3])
    expected = F.cross_entropy(head(hidden), labels, reduction="sum")
    gradients = torch.autograd.grad(expected, list(head.parameters()))
    head_loss(head, hidden, labels)[0].sum().backward()
    torch.testing.assert_close((head.weight.grad, head.bias.grad), gradients)
