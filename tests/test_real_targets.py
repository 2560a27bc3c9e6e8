"""Experiments of hub targets: sizes on the meta device, and the whole way on tiny random models."""

import pytest
import torch
from omegaconf import OmegaConf
from studies.overheads import meta_target
from tests.commands import ROOT, config_of
from tests.exhaustive import sparing
from tests.tiny import num_extra_parameters
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from slipstream import app
from slipstream.configuration import build, check_config
from slipstream.data.rendering import check_generation_markers, render_prompt, render_sample
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.training.command import Train

PARAMETERS = {
    "llama2_7b_chat": 6_738_415_616,
    "llama2_13b_chat": 13_015_864_320,
    "vicuna_7b": 6_738_415_616,
    "vicuna_13b": 13_015_864_320,
    "vicuna_33b": 32_528_943_616,
    "mistral_7b_instruct": 7_241_732_096,
    "phi3_mini": 3_821_079_552,
    "opt_1b3": 1_315_758_080,
    "opt_6b7": 6_658_473_984,
    "gpt2_xl": 1_557_611_200,
    "gpt_neo_1b3": 1_315_575_808,
    "llama3_8b_instruct": 8_030_261_248,
    "qwen3_8b": 8_190_735_360,
}
"""As their model cards have them, to the unit."""
INST = "<s>[INST] Hi [/INST]"
VICUNA = (
    "<s>A chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions. USER: Hi ASSISTANT:",
    " Hello</s>",
)
CONVERSATIONS = {
    "llama2_7b_chat": (INST, " Hello </s>"),
    "llama2_13b_chat": (INST, " Hello </s>"),
    "vicuna_7b": VICUNA,
    "vicuna_13b": VICUNA,
    "vicuna_33b": VICUNA,
    "mistral_7b_instruct": (INST, " Hello</s>"),
    "phi3_mini": ("<|user|>\nHi<|end|>\n<|assistant|>\n", "Hello<|end|>\n"),
    "opt_1b3": ("Hi", "Hello</s>"),
    "opt_6b7": ("Hi", "Hello</s>"),
    "gpt2_xl": ("Hi", "Hello</s>"),
    "gpt_neo_1b3": ("Hi", "Hello</s>"),
    "llama3_8b_instruct": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "Hello<|eot_id|>",
    ),
    "qwen3_8b": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "Hello<|im_end|>\n",
    ),
}
"""Prompt and answer as the model was trained to see them."""
TINY = dict(
    hidden_size=32,
    intermediate_size=48,
    ffn_dim=48,
    word_embed_proj_dim=32,
    num_hidden_layers=5,
    num_attention_heads=4,
    head_dim=8,
    max_position_embeddings=512,
    n_embd=32,
    n_layer=5,
    n_head=4,
    n_positions=512,
    num_layers=5,
    num_heads=4,
    attention_types=[[["global", "local"], 2], [["local"], 1]],
)
each_target = pytest.mark.parametrize("name", sorted(PARAMETERS))
LIKE_OTHERS = "llama2_13b_chat", "vicuna_7b", "vicuna_13b", "vicuna_33b", "opt_6b7"
"""Of the architecture of a smaller one."""


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and the special tokens of all templates."""
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "<|im_start|>"]
    special += ["<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    words = ["<unk>", *special, "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    return fast


def sizes_of(name: str) -> dict:
    """The target's architecture, shrunk."""
    own = dict(config_of("train", f"target={name}").target.architecture)
    own |= {key: size for key, size in TINY.items() if key in own}
    heads = own.get("num_key_value_heads")
    if heads is not None:
        own["num_key_value_heads"] = own["num_attention_heads"] if heads > 8 else 2
    if own.get("sliding_window"):
        own["sliding_window"] = 24
    return own | {"vocab_size": len(toy_tokenizer())}


@pytest.fixture
def tiny(name, tmp_path) -> list[str]:
    """A tiny random model of the target's architecture: the overrides that put it in its place."""
    sizes, tokenizer = sizes_of(name), toy_tokenizer()
    torch.manual_seed(0)
    ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes, **ids))
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    overrides = [
        f"target.architecture.{key}={'null' if v is None else v}" for key, v in sizes.items()
    ]
    return [f"target.name={tmp_path / 'target'}", *overrides]


def test_every_target_is_tested():
    targets = {path.stem for path in (ROOT / "conf" / "target").glob("*.yaml")}
    assert targets - {"small", "hub"} == PARAMETERS.keys() == CONVERSATIONS.keys()


@pytest.mark.parametrize(
    ("name",), sparing(zip(sorted(PARAMETERS)), lambda name: name not in LIKE_OTHERS)
)
def test_the_experiment_composes_and_has_the_expected_sizes(name):
    given = ["experiment=real_target", "speculator=streaming_paper", f"target={name}"]
    if name.startswith("opt"):  # its layers have no MLP module that streams could skip
        given.append("speculator.mlp=base+adapter")
    config = config_of("train", *given)
    check_config(config, Train)
    target = meta_target(OmegaConf.to_container(config.target.architecture))
    assert sum(parameter.numel() for parameter in target.model.parameters()) == PARAMETERS[name]
    speculator = StreamingSpeculator(target, build(config.speculator))
    assert num_extra_parameters(speculator) == 20 * target.hidden_size


@pytest.mark.parametrize(
    ("name",), sparing(zip(sorted(PARAMETERS)), lambda name: name == "qwen3_8b")
)
def test_two_steps_and_a_decode_on_a_tiny_model(name, tiny, tmp_path, capsys):
    line = '{"prompt": "Hi", "completion": "Hello"}\n'
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(line * 64)
    common = [*tiny, "target.device=cpu"]
    folder = app.train(
        config_of(
            "train", "experiment=real_target", f"target={name}", *common, f"data.path={tmp_path}",
            "data.regenerate=false", "data.batch_tokens=256", "data.max_length=400", "logger=csv",
            "trainer.max_steps=2", "trainer.max_epochs=8", "trainer.accumulate_grad_batches=1",
            "trainer.val_check_interval=1.0", "training.validation_prompts=1",
            f"output_dir={tmp_path / 'out'}",
        )
    )  # fmt: skip
    [record] = app.infer(
        config_of(
            "infer", f"target={name}", *common, "target.dtype=float32",
            f"speculator_path={folder}", f"data.path={tmp_path}",
            "data.split=validation", "num_prompts=1", "repeats=1", "limits.max_new_tokens=12",
            "methods.plain=null", f"output_dir={tmp_path / 'infer'}",
        )
    )  # fmt: skip
    assert record["identical"] == record["num_prompts"] == 1


@each_target
def test_the_template_is_the_models_own_and_marks_the_answer(name):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = config_of("train", f"target={name}").target.chat_template
    prompt, answer = CONVERSATIONS[name]
    assert tokenizer.decode(render_prompt(tokenizer, "Hi")) == prompt
    sample = render_sample(tokenizer, "Hi", "Hello")
    assert tokenizer.decode(sample.ids[sample.prompt_length :]) == answer
    if tokenizer.chat_template is not None:
        assert "{% generation %}" in tokenizer.chat_template
        check_generation_markers(tokenizer, "Hi", "Hello")
