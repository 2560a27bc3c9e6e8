"""The folder of a speculator as transformers' `custom_generate`: what `generate` itself says, token
for token; what it keeps, what it refuses, and `transformers serve` through it."""

import builtins
import gc
import json
import shutil
import time
import weakref
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from tests.commands import refused
from tests.exhaustive import sparing
from tests.tiny import save_tiny_target, tiny_speculator, tiny_target
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TextIteratorStreamer,
    TopKLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.utils.import_utils import is_serve_available

import slipstream
from slipstream.assets import locate
from slipstream.custom_generation import custom_generate
from slipstream.data.rendering import render_prompt
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.speculators.checkpoint import save_speculator
from slipstream.targets.loading import load_target
from slipstream.targets.packed import is_packed

SPECULATOR = str(locate("slipstream/small-streaming"))
PROMPTS = [
    "name[The Punter], eatType[pub], food[Italian], priceRange[cheap], area[riverside]",
    "name[The Mill], eatType[coffee shop], food[English]",
    "name[Alimentum], area[city centre]",
]
GREEDY = dict(max_new_tokens=40, do_sample=False)


@pytest.fixture(autouse=True)
def modules_of_transformers(tmp_path, monkeypatch):
    """Where transformers copies the code of folders to."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "own"))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(locate("slipstream/small-target"), padding_side="left")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(
        locate("slipstream/small-target"), dtype=torch.float32
    )


@pytest.fixture(scope="module")
def batch(tokenizer):
    """Three prompts of different lengths, padded on the left."""
    return tokenizer.pad([{"input_ids": render_prompt(tokenizer, each)} for each in PROMPTS])


def ours(model, inputs=None, folder=SPECULATOR, **options):
    return model.generate(inputs, custom_generate=folder, trust_remote_code=True, **options)


def one(batch, number=0):
    """The inputs of one prompt, without its padding."""
    shown = torch.tensor(batch["attention_mask"][number]).bool()
    return torch.tensor(batch["input_ids"])[number : number + 1, shown]


@pytest.mark.parametrize(("number",), sparing(zip(range(3)), lambda number: number == 0))
def test_one_prompt_is_answered_as_by_generate(model, batch, number):
    ids = one(batch, number)
    assert ours(model, ids, **GREEDY).tolist() == model.generate(ids, **GREEDY).tolist()


def test_prompts_of_a_batch_are_answered_as_by_generate(model, batch):
    inputs = {name: torch.tensor(each) for name, each in batch.items()}
    assert (inputs["attention_mask"] == 0).any()
    expected = model.generate(**inputs, **GREEDY)
    found = ours(model, **inputs, **GREEDY)
    assert found.tolist() == expected.tolist()
    assert (found[:, -1] == model.generation_config.pad_token_id).any()  # answers differ in length
    returned = ours(model, **inputs, **GREEDY, return_dict_in_generate=True)
    assert returned.sequences.equal(expected)


def test_without_a_padding_token_answers_are_padded_as_by_generate(model, batch, monkeypatch):
    ids = torch.cat([one(batch)] * 2)
    ids[1, -9:] = ids[0, 2:11]
    monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    for ends, first in ((1, 1), ([7, 1], 7)):
        expected = model.generate(ids, **GREEDY, eos_token_id=ends)
        assert (expected[:, -2:] == first).all(1).any()  # padded
        assert ours(model, ids, **GREEDY, eos_token_id=ends).tolist() == expected.tolist()


def test_answers_end_where_the_context_does():
    """Each where it fits no longer; `generate` goes on beyond it."""
    tiny, drafter = tiny_target().model, PromptLookup(2, 3)
    ids, options = (
        torch.arange(240).view(2, 120) % 40,
        dict(GREEDY, custom_generate=custom_generate),
    )
    mask = (torch.arange(120) >= torch.tensor([[60], [0]])).long()
    found = tiny.generate(ids, attention_mask=mask, drafter=drafter, **options)
    assert found.shape == (2, 160) and not found[1, 129:].any()
    alone = tiny.generate(ids[1:], drafter=drafter, **options)
    assert alone.tolist() == found[1:, : alone.shape[1]].tolist()


def test_holes_in_a_mask_are_refused(model, batch):
    ids = one(batch)
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    said = refused(lambda: ours(model, ids, attention_mask=mask))
    assert "only tokens before the prompt may be hidden" in said


def test_positions_of_its_own_are_refused_and_the_usual_ones_taken(model, batch):
    inputs = {name: torch.tensor(each) for name, each in batch.items()}
    usual = (inputs["attention_mask"].cumsum(1) - 1).masked_fill(
        inputs["attention_mask"] == 0, 1
    )  # as transformers fills them
    expected = model.generate(**inputs, **GREEDY).tolist()
    assert ours(model, **inputs, **GREEDY, position_ids=usual).tolist() == expected
    for other in (3 * usual, torch.arange(usual.shape[1])[None]):
        said = refused(lambda: ours(model, **inputs, **GREEDY, position_ids=other))  # noqa: B023
        assert said.startswith("position_ids: a prompt's first token has position 0")


def test_end_tokens_of_the_call_are_kept(model, batch):
    ids = one(batch)
    free = model.generate(ids, **GREEDY)[0, ids.shape[1] :].tolist()
    end = next(token for token in free[4:] if token not in free[:4])
    expected = model.generate(ids, **GREEDY, eos_token_id=[3, end]).tolist()
    assert len(expected[0]) < ids.shape[1] + len(free)
    assert ours(model, ids, **GREEDY, eos_token_id=[3, end]).tolist() == expected


def test_the_streamer_gets_the_whole_answer_and_its_end(model, tokenizer, batch):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=1)
    found = ours(model, one(batch), **GREEDY, streamer=streamer, tokenizer=tokenizer)
    assert "".join(streamer) == tokenizer.decode(found[0, one(batch).shape[1] :])


def test_samples_follow_the_seed(model, batch):
    ids, options = one(batch), dict(max_new_tokens=12, do_sample=True, temperature=1.0, top_k=0)
    torch.manual_seed(0)
    free = [ours(model, ids, **options).tolist() for _ in range(3)]
    assert len(set(map(str, free))) > 1
    torch.manual_seed(0)
    assert [ours(model, ids, **options).tolist() for _ in range(3)] == free
    seeded = [ours(model, ids, **options, seed=5, budget=b)[0].tolist() for b in (2, 12)]
    assert seeded[0] == seeded[1]
    several = ours(model, ids, **options, seed=5, num_return_sequences=3)
    assert len({str(own) for own in several.tolist()}) == 3
    length = len(seeded[0])
    assert several[0, :length].tolist() == seeded[0][: several.shape[1]]


class Anything:
    """A streamer that takes batches."""

    def put(self, value):
        pass

    end = put


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stop_strings": ["."]}, "stop_strings is not supported"),
        ({"num_beams": 2}, "beam_search is not supported"),
        (
            {"output_scores": True, "return_dict_in_generate": True},
            "output_scores is not supported",
        ),
        ({"repetition_penalty": 1.5}, "RepetitionPenaltyLogitsProcessor is not supported"),
        (
            {
                "max_new_tokens": 9,
                "num_return_sequences": 2,
                "do_sample": True,
                "streamer": Anything(),
            },
            "streamer: ",
        ),
        ({"budget": 0}, "budget: "),
        ({"seed": "x"}, "seed: must be a whole number"),
        ({"assistant_model": tiny_target().model}, "assistant_model is not supported"),
        ({"logits_processor": [TopKLogitsWarper(1)], "do_sample": True}, "TopKLogitsWarper is not"),
        ({"stopping_criteria": [EosTokenCriteria(7)]}, "EosTokenCriteria is not supported"),
    ],
)
def test_what_would_not_be_kept_is_refused(model, batch, options, sentence):
    assert sentence in refused(lambda: ours(model, one(batch), **options))


def test_reordered_weights_say_the_same(batch):
    model = AutoModelForCausalLM.from_pretrained(
        locate("slipstream/small-target"), dtype=torch.float32
    )
    expected = model.generate(one(batch), **GREEDY).tolist()
    assert ours(model, one(batch), **GREEDY, packed=True).tolist() == expected
    assert is_packed(model) == torch.backends.mkldnn.is_available()
    assert ours(model, one(batch), **GREEDY).tolist() == expected


def test_two_folders_of_one_name_are_two_speculators(tmp_path):
    """Transformers keeps the code of both as one module."""
    models, folders = [], []
    for number in range(2):
        place = save_tiny_target(tmp_path / str(number) / "target", seed=number)
        target = load_target(str(place), device="cpu", packed=False)
        speculator = tiny_speculator(target, number).float()
        folders.append(str(save_speculator(place.parent / "model", speculator, target, 8, "card")))
        models.append(AutoModelForCausalLM.from_pretrained(place))
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    ids = torch.tensor([[1, 2, 3, 4]])
    for model, folder in zip(models, folders, strict=True):
        expected = model.generate(ids, **options).tolist()
        assert ours(model, ids, folder, **options).tolist() == expected
    assert "and the weights of" in refused(lambda: ours(models[0], ids, folders[1], **options))
    gone = weakref.ref(models.pop())
    del model
    gc.collect()
    assert gone() is None  # and no drafter holds it


def test_without_slipstream_one_sentence_says_what_to_install(model, batch, monkeypatch):
    load = builtins.__import__

    def without(name, *rest):
        if name.startswith("slipstream"):
            raise ModuleNotFoundError(name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"which is not installed; install it from .* pip"):
        ours(model, one(batch))


def test_what_does_not_draft_has_no_such_file():
    assert not (locate("slipstream/small-sprinter") / "custom_generate").exists()
    said = refused(lambda: slipstream.from_pretrained("slipstream/small-sprinter"))
    assert "kind 'sprinter', which does not draft" in said


def test_an_older_folder_without_the_file_opens(tmp_path):
    folder = tmp_path / "older"
    shutil.copytree(SPECULATOR, folder)
    shutil.rmtree(folder / "custom_generate")
    assert slipstream.generate(PROMPTS[0], drafter=str(folder)).statistics.tau > 2


@pytest.fixture
def served(tmp_path):
    """A target's folder that has its speculator in it."""
    folder = tmp_path / "target"
    shutil.copytree(locate("slipstream/small-target"), folder)
    shutil.copytree(SPECULATOR, folder / "speculator")
    shutil.copytree(Path(SPECULATOR) / "custom_generate", folder / "custom_generate")
    return folder


def test_a_target_with_its_speculator_inside_needs_no_word_more(served, model, batch):
    own = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32, trust_remote_code=True)
    found = own.generate(input_ids=one(batch), **GREEDY)
    assert found.tolist() == model.generate(one(batch), **GREEDY).tolist()
    given = dict(custom_generate=slipstream.custom_generate, drafter=PromptLookup(3, 4))
    assert own.generate(input_ids=one(batch), **given, **GREEDY).tolist() == found.tolist()
    shutil.rmtree(served / "speculator")
    assert "no speculator is in" in refused(lambda: own.generate(one(batch)))


def test_transformers_serve_streams_through_it(served, model, tokenizer, batch, monkeypatch):
    if not is_serve_available():
        pytest.skip("`transformers serve` needs pip install transformers[serving]")
    from transformers.cli.serve import Serve

    import slipstream.custom_generation as ours

    calls, decode = [], ours.custom_generate
    monkeypatch.setattr(
        ours, "custom_generate", lambda *given, **more: calls.append(1) or decode(*given, **more)
    )
    server = Serve(
        str(served), dtype="float32", device="cpu", trust_remote_code=True, port=0,
        non_blocking=True,
    )  # fmt: skip
    try:
        body = {
            "model": str(served),
            "messages": [{"role": "user", "content": PROMPTS[0]}],
            "max_tokens": 40,
            "stream": True,
        }
        while not server.server.started:
            time.sleep(0.1)
        port = server.server.servers[0].sockets[0].getsockname()[1]
        where = f"http://localhost:{port}/v1/chat/completions"
        request = Request(where, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            lines = [line.decode().removeprefix("data: ") for line in answer if line.strip()]
    finally:
        server.kill_server()
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    pieces = [each["delta"].get("content") for chunk in chunks for each in chunk["choices"]]
    expected = model.generate(one(batch), **GREEDY)[0, one(batch).shape[1] :]
    assert "".join(filter(None, pieces)) == tokenizer.decode(expected, skip_special_tokens=True)
    assert len(pieces) > 4 and calls


def test_a_model_with_reordered_weights_is_the_one_its_speculator_belongs_to():
    """Its tokenizer is opened later, and its weights are not looked at again."""
    model = AutoModelForCausalLM.from_pretrained(
        locate("slipstream/small-target"), dtype=torch.float32
    )
    ids = torch.tensor([[5, 6, 7]])
    ours(model, ids, **GREEDY, packed=True)
    found = slipstream.generate("name[The Mill]", target=model, max_new_tokens=8)
    assert found.ids == slipstream.generate("name[The Mill]", max_new_tokens=8).ids
