"""Training language models on prompt/completion data: small ones, and LoRA layers of a target.

The first is how the models in `slipstream.assets` were made: next-token loss on completion tokens,
or the distribution of a teacher there (a draft model learns what its target says). The second is
the baseline that shared mode is compared with. Nothing here knows of speculation.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.assets import locate
from slipstream.core.errors import InputError
from slipstream.core.files import replaced_folder, write_text
from slipstream.core.processes import mean_over_processes
from slipstream.core.settings import Amount, Count, NotNegative, Text
from slipstream.core.templates import FIELD
from slipstream.data.batches import Batch
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.data.rows import Row, text_of
from slipstream.speculators.base import causal_rows
from slipstream.speculators.losses import completion_losses, head_loss, in_slices
from slipstream.targets.loading import load_target
from slipstream.targets.lora import LoraSettings, save_lora, with_lora
from slipstream.targets.target import Target
from slipstream.training.memory import Step, empty_target
from slipstream.training.module import TrainingModule, check_on_one_device

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% else %}<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]


class LanguageModelTraining(TrainingModule):
    """Next-token training of a transformers model, from scratch or on from another.

    architecture: `model_type` and the keyword arguments of its transformers config.
    tokenizer: folder of a tokenizer to share, or None to train one with `vocab_size` entries.
    start_from: folder of a model to go on from, with its own architecture and tokenizer (the other
    arguments for them are not used then), or None to start from scratch.
    teacher: a model whose next-token distribution is learned in place of the text's next token, by
    forward KL (distillation: Hinton et al. 2015; for draft models DistillSpec, Zhou et al. 2023);
    None for none. It also answers generated prompts (`data.generated_rows`).
    """

    title = "Small language model"
    betas = (0.9, 0.98)

    def __init__(
        self,
        architecture: dict,
        vocab_size: Count,
        tokenizer: Text | None,
        start_from: Text | None,
        teacher: Target | None,
        learning_rate: NotNegative,
        weight_decay: NotNegative,
        warmup_steps: Amount,
    ):
        super().__init__(learning_rate, weight_decay, warmup_steps)
        self.architecture, self.vocab_size = architecture, vocab_size
        self.tokenizer_path, self.start_from = tokenizer, start_from
        self.teacher = teacher
        if teacher is not None:
            how = f"to predict as {teacher.name} does (forward KL)"
            self.description = f"Trained by Slipstream {how}."

    def prepare(self, data: PromptCompletionData) -> None:
        """Make (or open) the model and its tokenizer, and render the data."""
        if self.start_from is None:
            self.model, self.tokenizer = self._new(data)
        else:
            opened = load_target(self.start_from, packed=False)  # in float32
            self.model, self.tokenizer = opened.model, opened.tokenizer
            self.model.requires_grad_(True).train()
        if self.teacher is not None:
            if self.teacher.tokenizer.get_vocab() != self.tokenizer.get_vocab():
                raise InputError(
                    "training.teacher: it has another vocabulary than the model; give its "
                    "tokenizer as training.tokenizer"
                )
            for setting in ("reads_markers", FIELD):  # not of a tokenizer's files
                setattr(self.tokenizer, setting, getattr(self.teacher.tokenizer, setting, None))
            self.teacher.model.requires_grad_(False)
            self.teacher = self.teacher.of_vocabulary(self.model.config.vocab_size)
            self.beside = sum(p.nbytes for p in self.teacher.model.parameters())
        data.prepare(self.tokenizer, self.teacher)
        self.data = data

    def _new(self, data: PromptCompletionData) -> tuple:
        """(model, tokenizer) with random weights."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        if self.tokenizer_path is None:
            tokenizer = train_tokenizer(data.rows("train"), self.vocab_size)
        else:
            tokenizer = AutoTokenizer.from_pretrained(locate(self.tokenizer_path))
        config = AutoConfig.for_model(
            **self.architecture,
            vocab_size=self.teacher.vocab_size if self.teacher else len(tokenizer),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        return AutoModelForCausalLM.from_config(config), tokenizer

    def losses(self, batch: Batch, seed: int | None) -> tuple[torch.Tensor, dict]:
        """The cross-entropy, or the KL divergence from the teacher."""
        loss = completion_loss(self.model, self.teacher, batch)
        return loss, {"loss": loss}

    def empty_step(self) -> Step:
        model = empty_target(self.model.config, self.model.dtype).model.requires_grad_(True)
        teacher = self.teacher
        if teacher is not None:
            teacher = empty_target(teacher.model.config, teacher.dtype)
            teacher = teacher.of_vocabulary(self.model.config.vocab_size)
        return partial(completion_loss, model, teacher)

    def on_fit_start(self) -> None:
        if self.teacher is not None:
            self.teacher.model.to(self.device)

    def groups(self) -> list[dict]:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]

    def save(self, folder: Path, card: str) -> None:
        """Write the model in bfloat16, the tokenizer and the card to `folder`."""
        with replaced_folder(folder) as made:
            self.model.to(torch.bfloat16).save_pretrained(made)
            self.tokenizer.save_pretrained(made)
            write_text(made / "README.md", card)


def train_tokenizer(rows: Iterable[Row], vocab_size: int):
    """A byte-level BPE tokenizer with `vocab_size` entries, of transformers, for a new model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for row in rows for text in (text_of(row.prompt), row.completion))
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def completion_loss(model: nn.Module, teacher: Target | None, batch: Batch) -> torch.Tensor:
    """The cross-entropy of completion tokens, or the KL divergence from the teacher there."""
    predicts, head = batch.supervised[:, 1:], model.get_output_embeddings()
    hidden = model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
    rows = [hidden[:, :-1][predicts]]
    if teacher is None:
        return _mean(head_loss(head, *rows, batch.ids[:, 1:][predicts])[0])
    with torch.no_grad():
        states = causal_rows(teacher, batch.ids).hidden[:, :-1][predicts]
        rows.append(teacher.norm(states))

    def divergence(rows: torch.Tensor, taught: torch.Tensor) -> tuple[torch.Tensor]:
        with torch.no_grad():
            theirs = teacher.logits_of_normed(taught).float().log_softmax(-1)
        ours = head(rows).float().log_softmax(-1)
        return (F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1),)

    return _mean(in_slices(divergence, head.out_features, *rows)[0])


def _mean(losses: torch.Tensor) -> torch.Tensor:
    """The mean of (M,) losses, over all processes."""
    return losses.sum() / mean_over_processes(torch.tensor(len(losses), device=losses.device))


class FineTuning(TrainingModule):
    """Cross-entropy of the completion tokens, LoRA layers of the target alone are trained.

    checkpointing: as in `SpeculatorTraining`. It writes a PEFT adapter folder, which
    `target.adapter=FOLDER` and PEFT itself open.
    """

    title = "LoRA adapter"
    checkpointed = ".lora_"

    def __init__(
        self,
        target: Target,
        lora: LoraSettings,
        checkpointing: bool,
        learning_rate: NotNegative,
        weight_decay: NotNegative,
        warmup_steps: Amount,
    ):
        super().__init__(learning_rate, weight_decay, warmup_steps)
        check_on_one_device(target)
        target.model.requires_grad_(False)
        self.target, _ = with_lora(target, lora)
        self.lora, self.target.checkpointing = lora, checkpointing
        self.model = self.target.model

    def losses(self, batch: Batch, seed: int | None) -> tuple[torch.Tensor, dict]:
        loss = _mean(completion_losses(self.target, batch))
        return loss, {"loss": loss}

    def empty_step(self) -> Step:
        target, _ = with_lora(empty_target(self.model.config, self.target.dtype), self.lora)
        target.checkpointing = self.target.checkpointing
        return lambda batch: _mean(completion_losses(target, batch))

    def save(self, folder: Path, card: str) -> None:
        with replaced_folder(folder) as made:
            save_lora(made, self.target)
            write_text(made / "README.md", card)
