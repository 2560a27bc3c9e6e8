"""Where answers end, what is counted, and what callers are told while they grow."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tests.commands import refused
from tests.tiny import reading_target, tiny_target, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, WordPiece
from transformers import PreTrainedTokenizerFast

import slipstream
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import PATIENCE, Answer, Generation, Limits, TextStream
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.run import tell
from slipstream.targets.loading import load_target

PROMPT = "name[The Punter], eatType[pub], food[Italian], priceRange[cheap], area[riverside]"


@pytest.fixture(scope="module")
def small():
    return load_target("slipstream/small-target")


def test_the_end_token_inside_an_accepted_path_ends_the_answer():
    """A perfect draft runs past the end token; nothing after it is emitted or counted."""
    target = tiny_target()
    free = PlainDecoder(target, Sampling(), Limits(30)).generate([1, 2, 3]).ids
    end = next(token for token in free[4:] if token not in free[:4])
    target.model.generation_config.eos_token_id = end
    length = free.index(end) + 1
    engine = Engine(target, DraftModel(target, 8), Sampling(), Limits(30), budget=9)
    generation = engine.generate([1, 2, 3])
    assert generation.ids == free[:length] and generation.finished == "end"
    assert generation.statistics.tokens == length
    assert generation.statistics.tau <= length - 1
    assert generation.accepted == (length - 1,) and generation.statistics.drafted == length - 1


def test_stop_strings_cut_the_text_in_the_middle_of_an_accepted_path(small):
    whole = slipstream.generate(PROMPT, small)
    stop = whole.text[20:24]
    short = slipstream.generate(PROMPT, small, stop=[stop])
    assert short.finished == "stop"
    assert short.text == whole.text[: whole.text.index(stop)]
    assert short.ids == whole.ids[: len(short.ids)] and len(short.ids) < len(whole.ids)


def test_the_limit_is_kept_and_the_context_is_never_left():
    target = tiny_target("opt", max_position_embeddings=20)
    for count in (1, 2, 7, 50):
        engine = Engine(target, DraftModel(target, 6), Sampling(), Limits(count), budget=7)
        generation = engine.generate([1, 2, 3])
        assert len(generation.ids) == min(count, 17) and generation.finished == "length"
    with pytest.raises(InputError, match="context of 20"):
        engine.generate(list(range(20)))


def test_text_and_tokens_are_told_as_they_are_decided(small):
    pieces, tokens = [], []
    answer = slipstream.generate(PROMPT, small, on_text=pieces.append)
    assert "".join(pieces) == answer.text and len(pieces) > 3
    engine = Engine(small, Streaming("slipstream/small-streaming", "deferred", 4), Sampling(),
                    Limits(96), budget=10)  # fmt: skip
    ids = render_prompt(small.tokenizer, PROMPT)
    again = engine.generate(ids, callback=lambda token, drafted, _: tokens.append((token, drafted)))
    assert [token for token, _ in tokens] == again.ids
    drafted = sum(was_drafted for _, was_drafted in tokens)
    assert 0 < drafted < len(tokens)
    assert drafted >= again.statistics.tokens - 1 - again.statistics.target_forwards


def test_the_time_shares_add_up(small):
    numbers = slipstream.generate(PROMPT, small).statistics
    assert set(numbers.shares) == {"prefill", "draft", "verify"}
    assert all(share > 0 for share in numbers.shares.values())
    assert 0 < numbers.overhead < numbers.seconds


def test_statistics_count_as_defined():
    """Two answers of 5 and 7 tokens in 2 and 3 forwards after prefill: tau (4 + 6) / 5. The second
    one ended with a drafted token, after which no next token came."""
    total = Statistics(1, 5, 2, 0.5, {"draft": 0.1}, drafted=2)
    total += Statistics(1, 7, 3, 0.5, {"verify": 0.2}, drafted=4)
    assert total.tau == 2.0 and total.mean_accepted_draft_tokens == 1.2
    assert total.tokens_per_second == 12.0
    assert total.overhead == pytest.approx(0.7)


def test_answers_end_at_the_end_tokens_of_the_generation_config():
    """Chat models list more of them there than in their config; `generate` obeys that list."""
    target = tiny_target()
    free = PlainDecoder(target, Sampling(), Limits(30)).generate([1, 2, 3]).ids
    end = next(token for token in free[4:] if token not in free[:4])
    other = next(token for token in range(target.vocab_size) if token not in free)
    target.model.generation_config.eos_token_id = [other, end]
    answer = PlainDecoder(target, Sampling(), Limits(30)).generate([1, 2, 3])
    assert answer.finished == "end" and answer.ids == free[: free.index(end) + 1]


def test_sampling_depends_on_the_seed_alone(small):
    answers = [
        slipstream.generate(PROMPT, small, temperature=1.0, seed=seed).text for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_the_last_drafted_token_of_an_answer_is_an_accepted_one():
    """A perfect draft of a whole answer: all but the first token were drafted, the end as well."""
    target = tiny_target()
    free = PlainDecoder(target, Sampling(), Limits(30)).generate([1, 2, 3]).ids
    length = next(place for place in range(4, 9) if free[place] not in free[:place]) + 1
    target.model.generation_config.eos_token_id = free[length - 1]
    engine = Engine(target, DraftModel(target, 12), Sampling(), Limits(30), budget=13)
    numbers = engine.generate([1, 2, 3]).statistics
    assert (numbers.tokens, numbers.target_forwards) == (length, 1)
    assert numbers.mean_accepted_draft_tokens == numbers.drafted == length - 1


@pytest.mark.parametrize("budget", [1, 5])
def test_an_answer_of_one_token_has_the_tau_of_plain_decoding(budget):
    target = tiny_target()
    engine = Engine(target, DraftModel(target, 4), Sampling(), Limits(1), budget)
    numbers = engine.generate([1, 2, 3]).statistics
    assert numbers.target_forwards == 0 and numbers.tau == 1.0
    assert numbers.mean_accepted_draft_tokens == 0


@pytest.mark.parametrize(("ids", "expected"), [(0, {0}), ([0, 5], {0, 5}), (None, set())])
def test_end_tokens_are_those_of_the_generation_config(ids, expected):
    """Token 0 is one, and None is none, whatever else the model's config says."""
    target = tiny_target()
    target.model.config.eos_token_id = 7
    target.model.generation_config.eos_token_id = ids
    assert target.end_ids == expected


def test_a_stop_string_may_be_given_alone(small):
    whole = slipstream.generate(PROMPT, small).text
    stop = whole[20:24]
    alone, listed = (slipstream.generate(PROMPT, small, stop=each) for each in (stop, [stop]))
    assert alone.text == listed.text == whole[: whole.index(stop)]
    assert Limits(stop="ab").stop == ("ab",)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], 5])
def test_stop_strings_that_would_end_everything_are_refused(stop):
    assert "stop: must be a non-empty text or a list" in refused(lambda: Limits(stop=stop))


def test_stop_strings_need_a_tokenizer():
    decoder = PlainDecoder(tiny_target(), Sampling(), Limits(4, stop="x"))
    assert "stop: the target has no tokenizer" in refused(lambda: decoder.generate([1, 2]))


def test_streamed_text_ends_where_the_text_ends(small):
    """What may begin a stop string is held back, and given out where it did not."""
    whole = slipstream.generate(PROMPT, small).text
    for stop in (whole[20:24], whole[10:19], whole[5:7] + "~", whole[-3:] + "~"):
        pieces = []
        answer = slipstream.generate(PROMPT, small, stop=stop, on_text=pieces.append)
        assert "".join(pieces) == answer.text
        assert stop not in answer.text
    assert answer.text == whole


@pytest.mark.parametrize("text", ["日本 – naïve 🚰 café", "🚰🚰"])
def test_characters_of_several_tokens_are_told_whole(small, text):
    target = tiny_target()
    target.tokenizer = small.tokenizer
    ids, pieces = small.tokenizer(text).input_ids, []
    answer = Answer(target, Limits(), len(ids), lambda _, __, piece: pieces.append(piece))
    for token in ids:
        answer.emit(token, drafted=True)
    assert answer.finished == "length" and len(ids) > len(text)
    assert "".join(pieces) == answer.text() == text
    assert not any("\ufffd" in piece for piece in pieces)


def with_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer whose first tokens are bytes, that of 'mill' is 256."""
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    words = {word: number for number, word in enumerate([*bytes_of, "▁mill", "▁", "."])}
    plain = Tokenizer(BPE(words, [], byte_fallback=True))
    replaced = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    plain.decoder = decoders.Sequence(list(replaced))
    return PreTrainedTokenizerFast(tokenizer_object=plain)


def test_pieces_of_bytes_add_up_where_the_text_ends_in_mid_character():
    """A tokenizer with bytes to fall back on spells a run of them together."""
    target = tiny_target(vocab_size=512)
    target.tokenizer = with_bytes()
    two = list("🚰🚰".encode())
    for ids in (two[:-2], [*two, 256], [*two[:5], 256, 258], [10, *two[:2]], [256, 257, 258], two):
        pieces = []
        answer = Answer(target, Limits(), len(ids), lambda *told, to=pieces: to.append(told[2]))
        for token in ids:
            answer.emit(token, drafted=False)
        assert "".join(pieces) == answer.text() != ""
    assert "".join(pieces) == "🚰🚰"


def test_characters_that_never_become_whole_are_looked_at_now_and_then(small):
    """Some thousand first bytes of a character; special tokens are not looked at."""
    decoded, usual = [], small.tokenizer.decode
    tokenizer = SimpleNamespace(
        all_special_tokens=["0"],
        all_special_ids=[0],
        added_tokens_decoder={},
        convert_ids_to_tokens=small.tokenizer.convert_ids_to_tokens,
        decode=lambda ids, **how: decoded.append(len(ids)) or usual(ids, **how),
    )
    stream, first = TextStream(tokenizer), small.tokenizer("🚰").input_ids[0]
    for _ in range(1000):
        stream.add(first)
    assert len(decoded) < 2 * (PATIENCE + 1000 / PATIENCE) + 4
    decoded.clear()
    for _ in range(1000):
        stream.add(0)
    assert not decoded


@pytest.mark.parametrize(("stop", "count"), [("\n", 2), ("\n\n", 4)])
def test_a_newline_that_is_a_byte_stops_at_once(stop, count):
    target = tiny_target(vocab_size=512)
    target.tokenizer = with_bytes()
    answer = Answer(target, Limits(stop=stop), 20)
    for token in (256, 10, 256, 10, 10, 256):
        answer.emit(token, drafted=False)
    assert answer.finished == "stop" and len(answer.ids) == count + (stop == "\n\n")


def test_characters_that_bytes_spell_are_told_and_stopped_at_as_soon_as_they_are_whole():
    target, pieces, spelled = tiny_target(vocab_size=512), [], [*"🚰".encode()]
    target.tokenizer = with_bytes()
    answer = Answer(target, Limits(), 40, lambda *told: pieces.append(told[2]))
    broken = [256, *spelled, *spelled, *spelled[:2], 256, *spelled]
    for token in broken:
        answer.emit(token, drafted=False)
    assert [place for place, piece in enumerate(pieces) if "🚰" in piece] == [4, 8, 15]
    assert "".join(pieces) == answer.text() == " mill🚰🚰\ufffd\ufffd mill🚰"
    for room, stop in ((40, "🚰"), (5, "🚰"), (7, "\ufffd")):
        answer = Answer(target, Limits(stop=stop), room)
        for token in broken:
            answer.emit(token, drafted=False)
        assert answer.finished == "stop" and len(answer.ids) == (7 if room == 7 else 5)
        assert answer.text() == (" mill🚰" if room == 7 else " mill")


@pytest.mark.parametrize("text", ["café 日本 🚰", r"\[/x] [bold]"])
def test_the_terminal_shows_what_was_written(small, capsys, text):
    """Characters that several tokens spell are not broken into replacement characters, and nothing
    is taken for markup."""
    ids = small.tokenizer(text).input_ids

    class Spelling(PlainDecoder):
        def generate(self, prompt_ids, seed=0, callback=None):
            answer = Answer(self.target, self.limits, len(ids), callback)
            for token in ids:
                answer.emit(token, drafted=False)
            return Generation(ids, answer.text(), "length", Statistics(1, len(ids)))

    tell(Spelling(small, Sampling(), Limits()), "Write", 0)
    assert capsys.readouterr().out.startswith(f"{text}\n")


def test_a_special_token_stops_where_it_is_asked_to():
    """Though no text has it."""
    target = reading_target()
    ids = PlainDecoder(target, Sampling(), Limits(12)).generate([3, 1, 4]).ids
    place = next(place for place in range(2, 12) if ids[place] not in ids[:place])
    word = f"w{ids[place]}"
    target.tokenizer.add_special_tokens({"additional_special_tokens": [word]})
    without_role = tiny_tokenizer()
    without_role.add_tokens(AddedToken(word, special=True))
    assert word not in without_role.all_special_tokens
    for tokenizer in (target.tokenizer, without_role):
        target.tokenizer = tokenizer
        found = PlainDecoder(target, Sampling(), Limits(12, word)).generate([3, 1, 4])
        assert found.finished == "stop" and found.ids == ids[: place + 1]
        assert word not in found.text


def test_blanks_are_told_as_they_are_in_the_text(small):
    """Some tokenizers would clean up what was told before."""
    words = {word: number for number, word in enumerate(["don", "'", "t", ".", "[UNK]"])}
    plain = Tokenizer(WordPiece(words, unk_token="[UNK]"))
    plain.decoder = decoders.WordPiece(cleanup=False)
    target, pieces = tiny_target(), []
    target.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, clean_up_tokenization_spaces=True
    )
    answer = Answer(target, Limits(), 4, lambda *told: pieces.append(told[2]))
    for token in range(4):
        answer.emit(token, drafted=False)
    assert "".join(pieces) == answer.text() == "don ' t ."


def test_threads_take_turns_with_a_target():
    target = tiny_target()
    alone = PlainDecoder(target, Sampling(), Limits(30))
    prompts = [[3, 1, seed] for seed in range(12)]
    expected = [alone.generate(prompt).ids for prompt in prompts]

    def answer(prompt):
        return Engine(target, PromptLookup(2, 3), Sampling(), Limits(30), 6).generate(prompt).ids

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, prompts)) == expected
