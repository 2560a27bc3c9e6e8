"""The Python calls: `slipstream.generate`, and transformers' `generate(custom_generate=...)`."""

import copy
import inspect
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear8bitLt
from hydra import compose, initialize_config_dir
from tests.commands import ROOT, config_of, refused
from tests.tiny import save_tiny_target, tiny_speculator, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import slipstream
from slipstream import app, generation
from slipstream.assets import locate
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.drafters.unispec import UniSpec
from slipstream.speculators.checkpoint import from_pretrained as load
from slipstream.speculators.checkpoint import save_speculator
from slipstream.targets.compiled import compile_target
from slipstream.targets.fingerprints import fingerprint
from slipstream.targets.loading import load_target, target_of

PROMPT = "name[The Punter], eatType[pub], food[Italian], priceRange[cheap], area[riverside]"
CALLS = slipstream.generate, slipstream.custom_generate
OTHER = "name[The Mill], eatType[coffee shop], food[English]"


@pytest.fixture(scope="module")
def small():
    return load_target("slipstream/small-target")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(locate("slipstream/small-target"))


@pytest.fixture(scope="module")
def ids(small):
    return torch.tensor([render_prompt(small.tokenizer, PROMPT)])


def ours(model, ids, drafter, **options):
    return model.generate(
        ids, custom_generate=slipstream.custom_generate, drafter=drafter, **options
    )


@pytest.mark.parametrize("setting", [{"max_time": 1.0}, {"prompt_lookup_num_tokens": 3}])
def test_custom_generate_refuses_settings_it_would_not_keep(setting):
    target = tiny_target()
    with pytest.raises(InputError, match="is not supported; leave out"):
        target.model.generate(
            torch.tensor([[1, 2, 3]]),
            custom_generate=slipstream.custom_generate,
            drafter=DraftModel(target, 4),
            max_new_tokens=5,
            pad_token_id=0,
            **setting,
        )


@pytest.mark.parametrize("drafter", [None, "prompt_lookup", "slipstream/small-streaming"])
def test_custom_generate_refuses_what_is_no_drafter(model, ids, drafter):
    assert refused(lambda: ours(model, ids, drafter)).startswith("drafter: give a Drafter")


def test_the_shipped_speculator_through_transformers_generate(small):
    """As the README shows it: a plain transformers model, no tokenizer in sight."""
    model = AutoModelForCausalLM.from_pretrained(locate(small.name), dtype=torch.float32)
    ids = torch.tensor([render_prompt(small.tokenizer, PROMPT)])
    drafter = Streaming("slipstream/small-streaming", schedule="deferred", top_k=4)
    found = model.generate(
        ids, custom_generate=slipstream.custom_generate, drafter=drafter, max_new_tokens=40
    )
    assert found.tolist() == model.generate(ids, max_new_tokens=40, do_sample=False).tolist()


GREEDY = dict(max_new_tokens=24, do_sample=False, pad_token_id=0)


def test_a_wrapped_custom_generate_streams_as_well(model, ids):
    tokenizer = AutoTokenizer.from_pretrained(locate("slipstream/small-target"))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=1)

    def wrapped(model, input_ids, **options):
        return slipstream.custom_generate(model, input_ids, drafter=PromptLookup(3, 4), **options)

    model.generate(ids, custom_generate=wrapped, max_new_tokens=24, streamer=streamer)
    assert len("".join(streamer)) > 20


def test_a_second_call_finds_what_the_first_one_made(tmp_path):
    """Kept stores, streams that were trained together with the target, and a draft model."""
    target, ids = tiny_target(), torch.tensor([[1, 2, 3, 4]])
    target.fingerprint = fingerprint(target)
    shared = tiny_speculator(target, mode="shared")
    folder = save_speculator(tmp_path / "model", shared, target, 8, "card")
    store = UniSpec(4, 4, 0.0, 1.0, [0.4, 0.3, 0.2, 0.1], True, True, keep=True)
    for drafter in (Streaming(folder, "auto", 2), store, DraftModel(target, 4)):
        first, second = (ours(target.model, ids, drafter, **GREEDY).tolist() for _ in range(2))
        assert first == second
    attached = store.attached(target_of(target.model))
    assert [each.store for each in attached.states] == [attached.kept] and attached.kept


def test_a_speculator_trained_anew_in_its_folder_is_opened_anew(tmp_path):
    target, found = tiny_target(), []
    target.fingerprint = fingerprint(target)
    for seed in (1, 2):
        save_speculator(tmp_path / "own", tiny_speculator(target, seed), target, 8, "card")
        found += [generation._drafter(tmp_path / "own", target) for _ in range(2)]
    assert found[0] is found[1] and found[2] is found[3]
    assert found[1] is not found[2]


def test_a_model_that_was_cast_between_two_calls_is_another_target(tmp_path):
    target, ids = tiny_target(), torch.tensor([[1, 2, 3, 4]])
    drafter = Streaming(tiny_speculator(target), "deferred", 2)
    for dtype in (torch.float64, torch.float32):
        model = target.model.to(dtype)
        expected = model.generate(ids, **GREEDY).tolist()
        assert ours(model, ids, drafter, **GREEDY).tolist() == expected


def test_a_model_that_was_given_other_parts_is_another_target():
    model, ids = tiny_target().model, torch.tensor([[1, 2, 3, 4]])
    found = []

    def answers() -> None:
        expected = model.generate(ids, **GREEDY).tolist()
        assert ours(model, ids, PromptLookup(2, 3), **GREEDY).tolist() == expected
        found.append(expected)

    answers()
    other = copy.deepcopy(model.get_input_embeddings())
    other.weight.data = other.weight.data.flip(0)
    model.set_input_embeddings(other)
    answers()
    del model.model.layers[3]
    model.config.num_hidden_layers = 3
    answers()
    assert found[0] != found[1] != found[2]


def test_models_that_could_not_answer_as_themselves_are_refused(model):
    """Dropout, no head, no weights, outliers that make rows depend on one another."""
    dropping = copy.deepcopy(model).train()
    slipstream.generate("w1", dropping, None, 1)  # nothing drops out
    dropping.model.layers[0].self_attn.attention_dropout = 0.1
    assert "call model.eval()" in refused(lambda: slipstream.generate("w1", dropping, None, 1))
    headless = model.model
    assert "AutoModelForCausalLM" in refused(lambda: target_of(headless))
    nowhere = copy.deepcopy(model).to("meta")
    assert "meta device" in refused(lambda: target_of(nowhere))
    eight = copy.deepcopy(tiny_target().model).float()
    linear = eight.model.layers[0].mlp.up_proj
    eight.model.layers[0].mlp.up_proj = Linear8bitLt(
        linear.in_features, linear.out_features, has_fp16_weights=False, threshold=6.0
    )
    assert "llm_int8_threshold=0.0" in refused(lambda: target_of(eight))


@pytest.mark.parametrize("limited", [False, True])
def test_a_models_own_generate_is_right_while_others_decode(limited):
    """Of padded prompts, which bring a mask, and of those that bring none; also while streams are
    limited in what they attend to."""
    model, ids = tiny_target().model, torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    drafter = PromptLookup(2, 3)
    if limited:
        speculator = tiny_speculator(target_of(model), attended_tokens=2)
        drafter = Streaming(speculator, "fused", 2)
    both, mask = torch.cat([ids, ids.roll(3, 1)]), torch.ones(2, 8, dtype=torch.long)
    mask[1, :5] = 0
    ways = (ids, {}), (both, {"attention_mask": mask})
    expected = [model.generate(own, **GREEDY, **more).tolist() for own, more in ways]
    ended = []

    def decode() -> None:
        while not ended:
            ours(model, ids, drafter, **GREEDY)

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(decode)
        try:
            found = [
                [model.generate(own, **GREEDY, **more).tolist() for own, more in ways]
                for _ in range(4)
            ]
        finally:
            ended.append(True)
        beside.result()
    assert found == [expected] * 4


def test_a_compiled_model_is_the_one_that_was_compiled(model):
    expected = slipstream.generate(PROMPT, model, max_new_tokens=12).ids
    compiled = torch.compile(model)
    assert slipstream.generate(PROMPT, compiled, max_new_tokens=12).ids == expected
    assert target_of(compiled) is target_of(model)


def test_models_of_any_dtype_take_drafters_by_name(model, ids):
    double = copy.deepcopy(model).double()
    found, plain = (slipstream.generate(PROMPT, double, name, 12) for name in ("anpd", None))
    assert found.ids == plain.ids


def test_what_a_model_asks_for_besides_is_told(caplog):
    penal = AutoModelForCausalLM.from_pretrained(locate("slipstream/small-target"))
    penal.generation_config.repetition_penalty = 1.8
    slipstream.generate(PROMPT, penal, None, 4)
    assert "asks for repetition_penalty=1.8, which is left out" in caplog.text


def test_tokens_that_the_model_has_no_embeddings_for_are_refused(small):
    for beyond in (small.model.get_input_embeddings().weight.shape[0], -1):
        given = [5, beyond]
        text = refused(lambda ids=given: PlainDecoder(small, Sampling(), Limits(4)).generate(ids))
        assert text.startswith("prompt: the model has embeddings") and f"token {beyond} is" in text


def test_a_draft_model_with_a_tokenizer_serves_a_model_without(model, ids):
    drafter = DraftModel(load_target("slipstream/small-draft"), 4)
    expected = model.generate(ids, max_new_tokens=24, do_sample=False).tolist()
    for _ in range(2):
        assert ours(model, ids, drafter, max_new_tokens=24).tolist() == expected


def test_generate_takes_messages_as_the_chat_template_has_them(small):
    expected = slipstream.generate(PROMPT, small).ids
    messages = [{"role": "user", "content": PROMPT}]
    assert slipstream.generate(messages, small).ids == expected
    assert [each.ids for each in slipstream.generate([messages], small)] == [expected]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_answers_several_prompts(small, temperature):
    options = dict(target=small, temperature=temperature)
    messages = [{"role": "user", "content": OTHER}]
    found = slipstream.generate([PROMPT, messages, PROMPT], seed=3, **options)
    alone = [
        slipstream.generate(prompt, seed=seed, **options)
        for seed, prompt in enumerate((PROMPT, messages, PROMPT), start=3)
    ]
    assert [each.text for each in found] == [each.text for each in alone]


@pytest.mark.parametrize("prompt", [5, None, [], [1, 2], [PROMPT, 3], {"role": "user"}, [[]]])
def test_generate_refuses_what_is_no_prompt(small, prompt):
    assert "prompt: give a text" in refused(lambda: slipstream.generate(prompt, small))


def test_generate_streams_one_answer_at_a_time(small):
    call = lambda: slipstream.generate([PROMPT, OTHER], small, on_text=print)  # noqa: E731
    assert "on_text" in refused(call)


@pytest.mark.parametrize("name", ["prompt_lookup", "draft_model", "unispec", "streaming", None])
def test_generate_takes_drafters_by_name(small, name):
    expected = slipstream.generate(PROMPT, small, drafter=None)
    assert expected.statistics.tau == 1.0
    found = slipstream.generate(PROMPT, small, drafter=name)
    assert found.ids == expected.ids and (name is None or found.statistics.tau > 1)


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        ("promt_lookup", "did you mean 'prompt_lookup'"),
        ("x", "known are"),
        (5, "give a Drafter"),
    ],
)
def test_generate_refuses_what_is_no_drafter(small, drafter, expected):
    assert expected in refused(lambda: slipstream.generate(PROMPT, small, drafter=drafter))


def test_named_drafters_draft_with_what_is_given(tmp_path):
    """Of a target of one's own, which those that ship are refused for."""
    save_tiny_target(tmp_path / "target", tokenizer=tiny_tokenizer())
    target = load_target(str(tmp_path / "target"))
    expected = slipstream.generate("w1 w2", target, None, 20).ids
    save_speculator(tmp_path / "mine", tiny_speculator(target), target, 9, "")
    mine, draft = {"speculator": tmp_path / "mine"}, {"draft": str(tmp_path / "target")}
    for name, given in (("auto", mine), ("streaming", mine), ("draft_model", draft)):
        assert slipstream.generate("w1 w2", target, name, 20, **given).ids == expected
        own = {"draft": str(tmp_path / "none")} if name == "draft_model" else {}
        said = refused(lambda name=name, own=own: slipstream.generate("w1 w2", target, name, **own))
        assert "trained for slipstream/small-target" in said or "none' cannot be opened" in said
    for drafter in (None, PromptLookup(2, 3), tmp_path / "mine"):
        said = refused(lambda each=drafter: slipstream.generate("w1", target, each, **mine))
        assert said.startswith("speculator, draft: they are for a drafter of conf/drafter")
    for name, given in (("unispec", mine), ("auto", draft)):  # which would ignore it
        call = partial(slipstream.generate, "w1", target, name, **given)
        assert f"drafter='{name}' drafts without one" in refused(call)


def test_generate_takes_a_folder_or_a_model_as_target(small, model, tmp_path):
    expected = slipstream.generate(PROMPT, small).ids
    assert slipstream.generate(PROMPT, Path(locate(small.name))).ids == expected
    assert slipstream.generate(PROMPT, model).ids == expected
    assert "target: give" in refused(lambda: slipstream.generate(PROMPT, 5))
    tiny = tiny_target().model
    assert "target: no tokenizer" in refused(lambda: slipstream.generate(PROMPT, tiny, None))


@pytest.mark.parametrize(
    ("saved", "opened"),
    [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32")],
)
def test_a_named_target_that_was_saved_in_16_bits_opens_in_bfloat16(tmp_path, saved, opened):
    save_tiny_target(tmp_path, tokenizer=tiny_tokenizer())
    tiny_target().model.to(getattr(torch, saved)).save_pretrained(tmp_path)
    slipstream.generate("w1", tmp_path, None, 2)
    (target,) = generation._LOADED.values()
    assert target.dtype == getattr(torch, opened)


def test_steps_with_a_target_run_compiled_unless_somebody_chose(small, model, monkeypatch):
    """Where that is the rule, as on a GPU; not with a model, whose adapters may change."""
    asked, target = [], copy.copy(small)
    target.compile_mode = None
    monkeypatch.setattr(generation, "compile_target", lambda target, mode: asked.append(target))
    slipstream.generate("w1", target, drafter=None, max_new_tokens=1)
    assert asked == [target]
    compile_target(target, "off")
    slipstream.generate("w1", target, drafter=None, max_new_tokens=1)
    slipstream.generate("w1", model, drafter=None, max_new_tokens=1)
    assert asked == [target]


def test_budget_auto_is_what_the_command_calibrated(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = lambda: slipstream.generate(PROMPT, small, budget="auto")  # noqa: E731
    assert "nothing was calibrated" in refused(call)
    assert "budget: give" in refused(lambda: slipstream.generate(PROMPT, small, budget="most"))
    app.infer(
        config_of(
            "infer", "calibrate=true", "calibration.budgets=[4,8]", "calibration.num_prompts=1",
            "limits.max_new_tokens=8", f"output_dir={tmp_path}/out",
        )
    )  # fmt: skip
    expected = slipstream.generate(PROMPT, small, drafter=None).ids
    assert call().ids == expected
    assert "".join(slipstream.stream(PROMPT, small, budget="auto")) == call().text
    several = slipstream.generate([PROMPT, PROMPT], small, budget="auto")
    assert [each.ids for each in several] == [expected] * 2


def test_python_calls_draft_as_infer_does_by_default():
    command = config_of("infer")
    calls = [inspect.signature(call).parameters for call in CALLS]
    assert {call["budget"].default for call in calls} == {command.budget}
    assert calls[0]["max_new_tokens"].default == command.limits.max_new_tokens
    assert calls[0]["temperature"].default == command.sampling.temperature


@pytest.mark.parametrize("seed", ["x", None, 1.5, -1, 2**70])
@pytest.mark.parametrize("call", [slipstream.generate, slipstream.stream, slipstream.chat])
def test_a_seed_that_is_none_is_refused(call, seed):
    with pytest.raises(InputError, match=r"^seed: must be a whole number"):
        call("Hi", seed=seed)


def test_a_program_with_a_hydra_of_its_own_names_drafters(small):
    """Hydra allows one at a time, and its state is global."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        found = slipstream.generate(PROMPT, small, "anpd", max_new_tokens=4)
        assert compose("infer").budget
    assert found.ids == slipstream.generate(PROMPT, small, None, max_new_tokens=4).ids


def test_threads_open_what_they_name_once(small, monkeypatch):
    made, given = [], dict(max_new_tokens=6, drafter=str(locate("slipstream/small-streaming")))
    monkeypatch.setattr(generation, "from_pretrained", lambda name: made.append(name) or load(name))
    vars(small).pop("named_drafter", None)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: slipstream.generate(PROMPT, small, **given).ids, range(6)))
    assert len({str(ids) for ids in found}) == 1 and len(made) == 1


def test_a_named_target_goes_before_another_one_comes(tmp_path, monkeypatch):
    """Two large models may not fit beside one another."""
    living, loaded = [], []

    def load_target(name, dtype):
        assert not any(each() for each in living)
        living.append(weakref.ref(target := load_small(name, dtype)))
        loaded.append(name)
        return target

    load_small = generation.load_target
    monkeypatch.setattr(generation, "load_target", load_target)
    monkeypatch.setattr(generation, "_LOADED", {})
    other = shutil.copytree(locate(generation.SMALL_TARGET), tmp_path / "other")
    for name in (generation.SMALL_TARGET, other, other, generation.SMALL_TARGET):
        for drafter in ("unispec", "anpd"):
            slipstream.generate(PROMPT, name, drafter, max_new_tokens=4)
    assert loaded == [generation.SMALL_TARGET, str(other), generation.SMALL_TARGET]


def test_a_drafter_that_lacks_a_setting_is_refused(small):
    with pytest.raises(
        InputError, match=r"^drafter.length: has no value; give one with length=NAME$"
    ):
        slipstream.generate(PROMPT, small, "adaptive")
