"""A reader's states are those of plain forwards of transformers' model over each text."""

import pytest
import torch
from tests.tiny import VOCABULARY, tiny_target

from slipstream.targets.compiled import compile_target
from slipstream.targets.reading import CachedModel, read_on
from slipstream.targets.target import Target

ARCHITECTURES = ("llama", "opt", "gpt2", "gpt_neo", "mistral")
"""Rotary and learned positions, and local attention."""


@torch.no_grad()
def plain(model: Target, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, D) states behind the last layer and (T, V) logits of one text, in one forward."""
    outputs = []

    def remember(_, __, output) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handle = model.family.layers[-1].register_forward_hook(remember)
    logits = model.model(torch.tensor([text])).logits[0]
    handle.remove()
    return outputs[0].reshape(len(text), -1), logits


class Reading:
    """Texts and their reader: every read is compared with plain forwards."""

    def __init__(self, model: Target, count: int, capacity: int = 64):
        self.model, self.reader = model, CachedModel(model, capacity, count)
        self.texts: list[list[int]] = [[] for _ in range(count)]
        self.generator = torch.Generator().manual_seed(count)
        # GPT-Neo attends in float32, whatever its weights are.
        self.tolerance = 1e-5 if model.model.config.model_type == "gpt_neo" else 1e-10

    @torch.no_grad()
    def read(self, *counts: int, last: bool = False) -> None:
        """So many more random tokens of each text; last: by `read`, not by `read_on`."""
        new = [
            torch.randint(0, VOCABULARY, (count,), generator=self.generator).tolist()
            for count in counts
        ]
        for text, own in zip(self.texts, new, strict=True):
            text += own
        assert self.reader.unread(self.texts) == new
        if last:
            read = self.reader.read(new)[:, None]
        else:
            read = read_on(self.model, new, self.reader.cache).hidden
        assert read.shape[:2] == (len(new), 1 if last else max(counts))
        for text, count, states in zip(self.texts, counts, read, strict=True):
            shown = min(count, 1) if last else count
            if shown:
                expected, logits = (each[-shown:] for each in plain(self.model, text))
                torch.testing.assert_close(states[:shown], expected, rtol=0, atol=self.tolerance)
                ours = self.model.logits(states[:shown])
                torch.testing.assert_close(ours, logits, rtol=0, atol=self.tolerance)
        assert self.reader.unread(self.texts) == [[] for _ in self.texts]

    def forget_beyond(self, *lengths: int) -> None:
        """And these are the texts from now on."""
        self.reader.forget_beyond(list(lengths))
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]

    def keep(self, *kept: int) -> None:
        self.reader.keep(list(kept))
        self.texts = [self.texts[place] for place in kept]

    def join(self, other: "Reading") -> None:
        self.reader.join(other.reader)
        self.texts += other.texts


@pytest.mark.parametrize("last", [False, True], ids=["states", "read"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ragged_texts_are_read_as_in_plain_forwards(architecture, last):
    reading = Reading(tiny_target(architecture, seed=1), 4)
    for counts in ((3, 9, 1, 6), (1, 1, 1, 1), (0, 2, 5, 1), (4, 0, 0, 3), (0, 0, 1, 0)):
        reading.read(*counts, last=last)
    reading.forget_beyond(5, 12, 7, 20)  # the last is shorter: nothing of it is forgotten
    reading.read(2, 1, 3, 0, last=last)
    reading.keep(1, 3)
    reading.read(1, 4, last=last)
    reading.forget_beyond(3, 11)
    reading.read(3, 0, last=last)
    reading.keep(1)
    reading.read(2, last=last)
    reading.read(1, last=last)


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_texts_of_one_length_are_read_without_a_mask_and_with_one(architecture):
    reading = Reading(tiny_target(architecture, seed=1), 2)
    for counts in ((4, 4), (1, 1), (3, 3), (1, 1)):
        reading.read(*counts)


def test_what_stands_beside_a_text_changes_nothing():
    """Right-padding and what other texts have read and forgotten."""
    model, states = tiny_target("mistral", seed=1), []
    for longer in ([], [7, 8, 9, 1, 2, 3, 4, 5]):
        reader, parts = CachedModel(model, 32, 2), []
        for own in ([3, 1], [4], [1, 5]):
            rows = read_on(model, [own, longer or own], reader.cache)
            parts.append(rows.hidden[0, : len(own)])
        reader.forget_beyond([5, 4])
        parts.append(read_on(model, [[9, 2], longer or [6]], reader.cache).hidden[0, :2])
        states.append(torch.cat(parts))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_texts_of_another_reader_are_read_on(architecture):
    """Whichever of the two has read more, or holds more."""
    model = tiny_target(architecture, seed=1)
    reading, other = Reading(model, 3), Reading(model, 2, capacity=32)
    reading.read(3, 1, 2)
    reading.keep(0, 2)
    other.read(9, 4)
    reading.join(other)
    reading.read(2, 1, 0, 5)
    reading.forget_beyond(4, 3, 8, 20)
    reading.read(1, 0, 3, 1)
    third = Reading(model, 1, capacity=80)
    third.read(1)
    reading.keep(1, 3)
    reading.join(third)
    reading.read(1, 4, 2)


@pytest.mark.parametrize("architecture", ["llama", "opt", "gpt_neo"])
def test_a_text_that_fills_the_context_lets_others_go_on(architecture):
    """Rows that pad it would lie beyond the last position."""
    reading = Reading(tiny_target(architecture, seed=1, max_position_embeddings=12), 2)
    reading.read(12, 2)
    reading.read(0, 4)
    reading.read(0, 6)
    assert len(reading.texts[1]) == reading.model.max_positions


def test_unread_is_what_a_text_has_more():
    reader = CachedModel(tiny_target(), 16, 2)
    texts = [[3, 1, 4, 1], [5, 9]]
    assert reader.unread(texts) == texts
    reader.read([[3, 1], [5, 9]])
    assert reader.unread(texts) == [[4, 1], []]
    reader.forget_beyond([1, 5])
    assert reader.unread(texts) == [[1, 4, 1], []]


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 3])
def test_prompts_that_compiled_layers_would_have_wider_are_read_to_their_own_end(count):
    reading = Reading(compile_target(tiny_target(seed=1), "reduce-overhead"), count)
    reading.tolerance = 1e-5  # compiled norms are computed in float32
    for tokens in (5, 1, 3):
        reading.read(*[tokens] * count, last=True)


def test_a_reader_that_is_full_says_so():
    reader = CachedModel(tiny_target(seed=1), 8, 1)
    reader.read([[3] * 8])
    with pytest.raises(ValueError, match="the cache holds 8 rows"):
        reader.read([[4, 5]])
