"""The way of a user with a model of their own, by the README's commands: a bfloat16 Qwen3 folder
with its own tokenizer and chat template, a vocabulary of 32,000, and own prompts."""

import json
import random

import pytest
import torch
from tests.commands import config_of
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

import slipstream
from slipstream import app
from slipstream.drafters.streaming import Streaming
from slipstream.targets.loading import load_target

VOCABULARY = 32_000
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices("aeioubcdfgklmnprst", k=6)) for _ in range(count)]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The model's folder, and one with own prompts: short and long ones, and conversations."""
    folder = tmp_path_factory.mktemp("own")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((" ".join(words(1000, n)) for n in range(60)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    assert len(fast) == VOCABULARY
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY, max_position_embeddings=512,
        tie_word_embeddings=True, eos_token_id=1, bos_token_id=None, pad_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        # Answers of some variety: what a random model says is one token again and again.
        model.model.embed_tokens.weight.normal_()
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for split, count in (("train", 40), ("validation", 12), ("test", 12)):
        lines = []
        for number in range(count):
            text = " ".join(words(4 + 6 * (number % 5), number))
            rows = [{"role": "user", "content": text}]
            if number % 3 == 0:
                rows += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": text}]
            lines.append(json.dumps({"messages": rows}))
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.exhaustive
def test_the_whole_way(own, tmp_path, capsys):
    target = ["target=hub", f"target.name={own}/model", "target.device=cpu"]
    training = [
        "train", *target, "data=jsonl", f"data.path={own}/data", "data.max_new_tokens=16",
        "data.batch_tokens=256", "logger=csv", "trainer.max_steps=3", "trainer.max_epochs=9",
        "trainer.val_check_interval=1.0", "training.validation_prompts=2",
        f"data.cache_dir={tmp_path}/regenerated",
    ]  # fmt: skip
    app.train(config_of(*training, "check=true", f"output_dir={tmp_path}/check"))
    said = capsys.readouterr().out
    assert "memory estimate: " in said and "steps: 3, with " in said
    assert "nothing was trained" in said
    folder = app.train(config_of(*training, f"output_dir={tmp_path}/mine"))
    said = capsys.readouterr().out
    assert "supervised" in said and "steps: 3, with " in said
    decoding = [
        "infer", *target, f"speculator_path={folder}", f"data.path={own}/data", "num_prompts=6",
        "limits.max_new_tokens=24", "repeats=1", f"output_dir={tmp_path}/infer",
        f"calibration.folder={tmp_path}/calibrations",
    ]  # fmt: skip
    for record in app.infer(config_of(*decoding)):
        assert record["num_prompts"] == 6 and record["dtype"] == "bfloat16"
    for divergence in app.infer(config_of(*decoding, "verify=true")):
        assert divergence.numeric_tie, divergence.sentence()
    exact = app.infer(config_of(*decoding, "verify=true", "target.dtype=float32"))
    assert exact == []
    sampled = ["sampling.temperature=0.3", "sampling.top_p=0.9"]
    for record in app.infer(config_of(*decoding, *sampled, "target.dtype=float32")):
        assert record["identical"] == 6, record["method"]  # plain sampling's, with the same seed
    quick = ["calibration.budgets=[2,4]", "calibration.num_prompts=2", "calibrate=true"]
    assert len(app.infer(config_of(*decoding, *quick))) >= 3
    capsys.readouterr()
    [record] = app.infer(config_of(*decoding, "budget=auto", "methods.plain=null"))
    assert "as calibrated" in (said := capsys.readouterr().out) or "decodes plainly" in said
    large = load_target(f"{own}/model", "bfloat16")
    messages = [{"role": "user", "content": " ".join(words(5, 3))}]
    drafter = Streaming(str(folder), "deferred", 3)
    answer = slipstream.generate(messages, target=large, drafter=drafter, max_new_tokens=20)
    plain = slipstream.generate(messages, target=large, drafter=None, max_new_tokens=20)
    assert answer.statistics.tokens == plain.statistics.tokens == 20
