"""The target's own answers as data: right, kept, shared out, gone on with; the same file always."""

import multiprocessing
import os
from collections import Counter
from itertools import product
from random import Random

import pytest
import torch
from tests.commands import config_of, refused
from tests.data.test_rendering import TEMPLATE, said
from tests.graphs import stand_in
from tests.tiny import VOCABULARY, tiny_target, tiny_tokenizer

from slipstream.configuration import build
from slipstream.core.sampling import Sampling
from slipstream.data import answers, refill
from slipstream.data.batches import collate
from slipstream.data.refill import MOST_REQUESTS, OwnAnswers, cache_bytes, working_copy
from slipstream.data.regeneration import Regeneration
from slipstream.data.rendering import Sample, render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.speculators.losses import NO_LABEL, future_tokens
from slipstream.targets import compiled
from slipstream.targets.compiled import CompiledLayers, compile_target
from slipstream.targets.loading import load_target
from slipstream.targets.packed import is_packed, packing_available

LENGTHS = (5, 9, 2, 5, 7, 1, 12, 3, 30, 4, 6, 4, 5)
MIXED = Regeneration(temperature=[0, 0.7, 1.3])


def ending_target(template=None):
    """A tiny target in whose answers token 3 turns up and ends them."""
    target = tiny_target(vocab_size=VOCABULARY)
    target.model.generation_config.eos_token_id = 3
    target.tokenizer = tiny_tokenizer()
    target.tokenizer.chat_template = template
    return target


def some_prompts(lengths=LENGTHS):
    random = Random(0)
    return [" ".join(f"w{random.randrange(4, VOCABULARY)}" for _ in range(n)) for n in lengths]


def answered(folder, prompts=None, how=MIXED, target=None, **given):
    target = target or ending_target()
    given = dict(max_new_tokens=40, cache_dir=folder, seed=2) | given
    return how.samples(target, target.tokenizer, prompts or some_prompts(), **given)


def content(folder) -> bytes:
    """Of the one file there is."""
    (path,) = folder.iterdir()
    return path.read_bytes()


def in_small_portions():
    """Of four prompts, two requests at a time."""
    refill.MOST_REQUESTS, refill.FULL_BATCHES = 2, 2


@pytest.fixture
def small_portions(monkeypatch):
    for name in ("MOST_REQUESTS", "FULL_BATCHES"):
        monkeypatch.setattr(refill, name, getattr(refill, name))
    in_small_portions()


@pytest.fixture
def started(monkeypatch) -> list[int]:
    """How many requests join at a time."""
    found, start = [], PlainDecoder.start

    def counting(decoder, requests):
        found.append(len(requests))
        start(decoder, requests)

    monkeypatch.setattr(PlainDecoder, "start", counting)
    return found


@pytest.mark.parametrize("how", [Regeneration(), Regeneration(1.0)])
def test_the_answers_are_the_plain_ones_and_unfinished_ones_are_kept(tmp_path, how):
    target, prompts = ending_target(), some_prompts()
    plain = PlainDecoder(target, Sampling(how.temperature), Limits(40))
    asked = [render_prompt(target.tokenizer, prompt) for prompt in prompts]
    found = [plain.generate(ids, how._drawn(n, 2, ids)[1]) for n, ids in enumerate(asked)]
    assert len({answer.finished for answer in found}) == 2
    assert answered(tmp_path, how=how) == [
        Sample(ids + answer.ids, len(ids)) for ids, answer in zip(asked, found, strict=True)
    ]


def test_requests_join_as_others_finish_and_no_more_than_fit(tmp_path, monkeypatch, started):
    monkeypatch.setattr(refill, "MOST_REQUESTS", 8)
    running, step = [], PlainDecoder.step

    def watching(decoder):
        running.append(len(decoder.running.requests))
        return step(decoder)

    monkeypatch.setattr(PlainDecoder, "step", watching)
    answered(tmp_path)
    assert sum(started) == len(LENGTHS) and len(started) > 4
    assert max(running) == 8
    full = running[: len(running) - running[::-1].index(8)]
    assert set(full) == {7, 8}  # until nobody waits: when a quarter are free others join


def test_the_batch_is_bounded_by_the_memory():
    target, longest = ending_target(), 60
    memory = int(refill.CACHES * cache_bytes(target) * (longest + 40) * 5.5)
    assert OwnAnswers(target, 40, memory).most(longest) == 5
    assert OwnAnswers(target, 40, 1).most(longest) == 1
    assert OwnAnswers(target, 40, 2**40).most(longest) == MOST_REQUESTS
    assert cache_bytes(target) == target.new_cache(1).nbytes


def test_buffers_of_graphs_keep_to_the_memory(monkeypatch):
    """Few long prompts, then many short ones: no buffers are as long as for the ones and as wide
    as for the others."""
    stand_in(monkeypatch)
    monkeypatch.setattr(compiled, "REPLAYING", ("cpu",))
    target, sizes = tiny_target(max_position_embeddings=512), []
    allocate, compile_ = target.allocate, compiled.compile_target

    def counted(*given):
        cache = allocate(*given)
        sizes.append(cache.nbytes)
        return cache

    monkeypatch.setattr(target, "allocate", counted)
    monkeypatch.setattr(refill, "compile_target", lambda own, _: compile_(own, "reduce-overhead"))
    memory = int(refill.CACHES * cache_bytes(target) * 1024)
    answerer, lengths = OwnAnswers(target, 8, memory), [300] * 2 + [4] * 40
    asked = [answers.Question([3 + n % 20] * size, 0.0, 0) for n, size in enumerate(lengths)]
    assert (answerer.most(300), answerer.most(4)) == (2, 32)
    found = list(answerer.answer(asked, [[0, 1], [*range(2, 42)]], lambda _: None))
    assert len(found) == 2 and max(sizes) <= memory / refill.CACHES


def test_portions_hold_prompts_of_similar_length_longest_first():
    questions = [answers.Question([1] * length, 0.0, 0) for length in (3, 90, 4, 80, 5)]
    target = ending_target()
    memory = int(refill.CACHES * cache_bytes(target) * 100)
    assert OwnAnswers(target, 10, memory).portions(questions) == [[1, 3, 4, 2, 0]]
    assert OwnAnswers(target, 10, 1).portions([*questions] * 2)[0][:4] == [1, 6, 3, 8]


def test_killed_and_continued_gives_the_same_file(tmp_path, monkeypatch, small_portions, capsys):
    whole = answered(tmp_path / "whole")
    done, refilled = [], refill.refilled

    def breaking(decoder, requests, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.extend([requests])
        refilled(decoder, requests, *rest)

    monkeypatch.setattr(refill, "refilled", breaking)
    with pytest.raises(KeyboardInterrupt):
        answered(tmp_path / "parts")
    (part,) = (tmp_path / "parts").iterdir()
    assert len(part.read_text().splitlines()) == 8
    part.write_text(part.read_text() + '{"prompt": 3, "ids": [1, 2')
    counts = []

    def counting(decoder, requests, *rest):
        counts.append(len(requests))
        refilled(decoder, requests, *rest)

    monkeypatch.setattr(refill, "refilled", counting)
    assert answered(tmp_path / "parts") == whole
    assert "ended in the middle of a line" in capsys.readouterr().out
    assert sum(counts) == len(LENGTHS) - 8
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert answered(tmp_path / "parts") == whole and sum(counts) == len(LENGTHS) - 8


def test_a_portion_is_answered_alike_whatever_was_before_it(tmp_path, monkeypatch, small_portions):
    """Rounding depends on what is computed together: float32 would tell."""
    together, start = Counter(), PlainDecoder.start

    def noting(decoder, requests):
        running = decoder.running.requests if decoder.running else []
        together[str([request.tokens for request in [*running, *requests]])] += 1
        start(decoder, requests)

    monkeypatch.setattr(PlainDecoder, "start", noting)
    answered(tmp_path / "whole")
    whole, ranks = together.copy(), []
    together.clear()
    for rank in (1, 0):
        monkeypatch.setattr(answers, "launched", lambda rank=rank: (rank, 2))
        with monkeypatch.context() as patch:
            if rank:
                patch.setattr(answers.time, "sleep", lambda _: ranks.append(1) or _leave())
                with pytest.raises(InterruptedError):
                    answered(tmp_path / "shared")
                (part,) = (tmp_path / "shared").iterdir()
                assert len(part.read_text().splitlines()) == 5
            else:
                answered(tmp_path / "shared")
    assert together == whole and ranks == [1]
    assert content(tmp_path / "shared") == content(tmp_path / "whole")


def _leave():
    raise InterruptedError


def _one_of_two(rank, folder, queue):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    counted, refilled = [], refill.refilled
    in_small_portions()
    refill.refilled = lambda decoder, own, *rest: (
        counted.append(len(own)) or refilled(decoder, own, *rest)
    )
    queue.put((sum(len(sample.ids) for sample in answered(folder)), sum(counted)))


@pytest.mark.exhaustive
def test_two_processes_share_the_work_and_read_the_same_file(tmp_path, small_portions):
    whole = answered(tmp_path / "one")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=_one_of_two, args=(rank, tmp_path / "two", queue))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    found = [queue.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert {total for total, _ in found} == {sum(len(sample.ids) for sample in whole)}
    assert sorted(count for _, count in found) == [5, 8]
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_a_complete_file_is_only_read(tmp_path, monkeypatch):
    whole = answered(tmp_path)
    (path,) = tmp_path.iterdir()

    def refusing(*_, **__):
        raise PermissionError(13, "Permission denied")

    for name in ("write_text", "write_bytes", "mkdir", "unlink"):
        monkeypatch.setattr(type(path), name, refusing)
    monkeypatch.setattr(answers, "appended", refusing)
    monkeypatch.setattr(answers, "write_text", refusing)
    assert answered(tmp_path) == whole


def test_damaged_lines_are_answered_again(tmp_path, started):
    whole = answered(tmp_path)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    lines = before.split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], b"\0\0", lines[4][:-4], *lines[5:]]))
    started.clear()
    assert answered(tmp_path) == whole and started
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_ends_with_one_sentence(tmp_path):
    (tmp_path / "file").write_text("kept")
    found = refused(lambda: answered(tmp_path / "file" / "below"))
    assert found.startswith("data.cache_dir: cannot write to")


def test_nothing_is_learned_after_an_unfinished_answer(tmp_path):
    kept = answered(tmp_path, how=Regeneration())
    unfinished = [sample for sample in kept if sample.ids[-1] != 3]
    assert unfinished and len(unfinished) < len(kept)
    for sample in unfinished:
        assert len(sample.ids) == sample.prompt_length + 40 and 3 not in sample.ids[-40:]
    assert content(tmp_path).count(b'"ended": false') == len(unfinished)
    # beside a longer one, so that there is padding after its end
    first = min(unfinished, key=lambda sample: len(sample.ids))
    batch = collate([first, max(kept, key=lambda sample: len(sample.ids))])
    assert batch.supervised[0].nonzero()[:, 0].tolist() == [*range(len(first.ids))][-40:]
    labels = future_tokens(batch, 3)
    learned = [label for label in labels.next_tokens[0].tolist() if label != NO_LABEL]
    assert learned == first.ids[-40:]
    assert labels.tokens[0, -1].tolist() == [NO_LABEL] * 3
    assert labels.tokens[0, -3].tolist() == [*first.ids[-2:], NO_LABEL]


def test_temperatures_are_mixed_by_seed_and_number(tmp_path):
    prompts = some_prompts([4]) * 60
    found = answered(tmp_path, prompts, Regeneration([0, 1.0]))
    greedy = answered(tmp_path / "greedy", prompts[:1], Regeneration())[0]
    count = sum(sample == greedy for sample in found)
    assert 15 < count < 45 and len({tuple(sample.ids) for sample in found}) > 15
    again = answered(tmp_path / "fewer", prompts[:20], Regeneration([0, 1.0]))
    assert again == found[:20]
    assert answered(tmp_path / "seed", prompts, Regeneration([0, 1.0]), seed=3) != found


ASKED = said("system w9", "user w5 w6", "assistant w7", "user w8", "assistant w7", "user w10")


def turn_by_turn(target, messages, tokens=12, most=1000):
    """Ids and spans, by plain decoding of one prompt after the other."""
    plain, so_far, ids, spans = PlainDecoder(target, Sampling(), Limits(tokens)), [], [], []
    for message in [*messages, None]:
        if message is not None and message["role"] != "assistant":
            so_far.append(message)
            continue
        asked = render_prompt(target.tokenizer, so_far)
        if len(asked) >= most:
            break
        assert asked[: len(ids)] == ids
        answer = plain.generate(asked)
        ids = asked + answer.ids
        spans.append((len(asked), len(ids)))
        if answer.finished != "end":
            break
        text = target.tokenizer.decode(answer.ids, skip_special_tokens=True)
        so_far.append({"role": "assistant", "content": text})
    return ids, spans


def chatting_target():
    """Its answers end with w4, as its chat template has it."""
    target = ending_target(TEMPLATE)
    target.model.generation_config.eos_token_id = 4
    target.tokenizer.add_special_tokens({"eos_token": "w4"})
    return target


def conversations():
    """Those whose every answer ends in time, and those where one is cut."""
    target, random = chatting_target(), Random(1)
    roles = [message["role"] for message in ASKED]
    for _ in range(40):
        words = [f"w{random.randrange(5, VOCABULARY)}" for _ in roles]
        yield (
            [dict(role=role, content=word) for role, word in zip(roles, words, strict=True)],
            target,
        )


def test_every_turn_of_the_assistant_is_answered_anew_and_supervised(tmp_path):
    both = list(conversations())
    prompts, target = [prompt for prompt, _ in both], both[0][1]
    expected = [turn_by_turn(target, prompt) for prompt in prompts]
    assert {len(spans) for _, spans in expected} == {1, 2, 3}
    found = answered(tmp_path, prompts, Regeneration(), target, max_new_tokens=12)
    assert [(sample.ids, sample.supervised) for sample in found] == expected


def test_what_is_beyond_the_longest_length_is_left_out(tmp_path, caplog):
    both = list(conversations())
    prompts, target = [prompt for prompt, _ in both], both[0][1]
    given = dict(how=Regeneration(), target=target, max_new_tokens=12)
    found = answered(tmp_path, prompts, **given, max_length=16)
    whole = answered(tmp_path, prompts, **given)
    assert "beyond data.max_length=16 tokens" in caplog.text
    assert found and all(len(sample.ids) <= 16 for sample in found)
    kept, cut = {tuple(sample.prompt[:4]): sample for sample in whole}, []
    for sample in found:
        longer = kept[tuple(sample.prompt[:4])]
        assert longer.ids[: len(sample.ids)] == sample.ids
        spans = [(start, min(stop, 16)) for start, stop in longer.supervised if start < 16]
        assert sample.supervised == spans
        cut.append(spans != longer.supervised[: len(spans)])
    assert any(cut)  # an answer is learned as far as it fits
    assert {len(sample.supervised) for sample in found} >= {1, 2}


def test_a_template_that_forgets_turns_gives_a_sample_for_each(tmp_path):
    target = chatting_target()
    target.tokenizer.chat_template = TEMPLATE.replace(
        "{{ message['content'] }} w4", "{{ message['content'] if loop.last else 'w11' }} w4"
    )
    prompts = [prompt for prompt, _ in conversations()]
    found = answered(tmp_path, prompts, Regeneration(), target, max_new_tokens=12)
    assert len(found) > len(prompts)
    for sample in found:  # the one answer that is shown as it was written
        assert all(sample.ids[start:stop] == [11, 4] for start, stop in sample.earlier)


def test_a_prompt_without_tokens_is_named(tmp_path):
    sentence = refused(lambda: answered(tmp_path, ["w5", " "], Regeneration()))
    assert sentence.startswith("data: the row that begins '': it has no tokens")


def test_a_greeting_stays_as_it_is(tmp_path):
    target = chatting_target()
    messages = said("assistant w7", "user w5")
    (sample,) = answered(tmp_path, [messages], Regeneration(), target)
    assert sample.prompt == render_prompt(target.tokenizer, messages) and not sample.earlier


def test_a_float32_target_computes_in_bfloat16_on_a_copy():
    """Where the processor multiplies such numbers fast."""
    fast = packing_available(torch.bfloat16)
    target = load_target("slipstream/small-target", device="cpu", packed=False)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    with working_copy(target) as worker:
        assert worker is not target and is_packed(worker.model)
        assert worker.dtype == (torch.bfloat16 if fast else torch.float32)
        assert worker.end_ids == target.end_ids
    assert target.dtype == torch.float32 and not is_packed(target.model)
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with working_copy(load_target("slipstream/small-target", device="cpu")) as worker:
        assert worker.dtype == torch.float32  # reordered already: as it is


def test_steps_run_compiled_where_the_device_gains_by_it(tmp_path, monkeypatch):
    """As on a CUDA device, with a stand-in for the compiler."""
    spans = []
    monkeypatch.setattr(
        torch, "compile", lambda span, **_: lambda *own: spans.append(1) or span(*own)
    )
    monkeypatch.setattr(
        refill, "compile_target", lambda target, _: compile_target(target, "reduce-overhead")
    )
    target = ending_target()
    whole = answered(tmp_path / "eager", target=ending_target())
    spans.clear()
    target.compiled = before = CompiledLayers(target)
    assert answered(tmp_path / "compiled", target=target) == whole
    assert spans and target.compiled is before and target.compile_mode is None
    assert content(tmp_path / "compiled") == content(tmp_path / "eager")


@pytest.mark.parametrize(
    "override, expected",
    [
        ("temperature=-1", "data.regeneration: temperature: "),
        ("temperature=[0,warm]", "data.regeneration: temperature: "),
        ("temperature=[]", "data.regeneration: temperature: "),
        ("memory_gib=0", "data.regeneration: memory_gib: "),
        ("concurrency=0", "data.regeneration: concurrency: "),
        ("endpoint=http://127.0.0.1:1/v1", "data.regeneration: model: "),
    ],
)
def test_settings_that_cannot_be_end_with_one_sentence(override, expected):
    config = config_of("train", f"data.regeneration.{override}")
    assert refused(lambda: build(config.data)).startswith(expected)


def test_each_process_of_a_machine_has_a_device_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = refused(lambda: load_target("slipstream/small-target"))
    assert found.startswith("target.device: 'cuda:1' is not available here")


def test_every_seed_prompt_and_turn_has_numbers_of_its_own(tmp_path):
    how, prompts = Regeneration(1.0), some_prompts()
    seeds = {how._drawn(*each)[1] for each in product((0, 1), (0, 1), ([5, 6], [5, 7]))}
    assert len(seeds) == 8
    first, other = (answered(tmp_path / str(seed), prompts, how, seed=seed) for seed in (0, 1))
    assert first != other and first == answered(tmp_path / "0", prompts, how, seed=0)
