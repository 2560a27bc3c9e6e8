"""The loss by slices of the vocabulary against `F.cross_entropy` on all logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.speculators.head_loss import head_loss


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("slice_size", [1, 7, 40, 64])
def test_values_gradients_and_guesses(bias, slice_size):
    torch.manual_seed(0)
    head = nn.Linear(6, 40, bias=bias).double().requires_grad_(False)
    hidden = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    labels, outer = torch.randint(0, 40, (9,)), torch.rand(9, dtype=torch.float64)
    logits = head(hidden)
    expected = F.cross_entropy(logits, labels, reduction="none")
    (gradient,) = torch.autograd.grad((expected * outer).sum(), hidden)
    losses, guesses = head_loss(head, hidden, labels, slice_size)
    (found,) = torch.autograd.grad((losses * outer).sum(), hidden)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)
    assert guesses.tolist() == logits.argmax(-1).tolist()


def test_a_head_that_is_trained_gets_its_gradient():
    torch.manual_seed(0)
    head = nn.Linear(6, 40)
    losses, _ = head_loss(head, torch.randn(3, 6), torch.tensor([1, 2, 3]), slice_size=8)
    losses.sum().backward()
    assert head.weight.grad.abs().sum() > 0
