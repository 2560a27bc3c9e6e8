"""What it would be worth to see the future: the next token is predicted by a row that may attend to
the true tokens beyond it (Eq. 7, Figure 4).

The rows that see the future are apart from the context, as streams are: a row of the context that
had peeked would tell later rows the very token that they are to predict.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from statistics import fmean

import torch
import torch.nn.functional as F
from rich.progress import track

from slipstream.core.errors import InputError
from slipstream.core.masks import causal_mask, stream_mask
from slipstream.core.settings import Amount, Count, NotNegative
from slipstream.data.batches import Batch
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.data.rendering import render_sample
from slipstream.decoding.answer import Limits
from slipstream.evaluation.metrics import rouge, sql_exact_match
from slipstream.speculators.losses import NO_LABEL, future_tokens
from slipstream.targets.lora import LoraSettings, merge, with_lora
from studies import Plot, Prompt, Result, Target


def peeking(
    target: Target,
    prompts: list[Prompt],
    data: PromptCompletionData,
    lora: LoraSettings,
    gammas: Sequence[Amount],
    steps: Count,
    learning_rate: NotNegative,
) -> Result:
    """LoRA fine-tuning on `data` for `steps` steps, once for each number of future tokens in
    `gammas` (0: ordinary fine-tuning); measured on its validation rows, and by writing answers to
    the prompts, where the future is that of the first reference."""
    if not all(prompt.references for prompt in prompts):
        raise InputError("data: the study needs references; name rows that have completions")
    data.prepare(target.tokenizer, target)
    rows = []
    for gamma in gammas:
        torch.manual_seed(0)
        adapted, trained = with_lora(target, lora)
        optimizer = torch.optim.AdamW(trained.values(), lr=learning_rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        loader = data.train_dataloader()
        loader.load_state_dict({"epoch": 0, "position": 0})  # from the first batch on
        batches = chain.from_iterable(repeat(loader))
        for _ in track(range(steps), description=f"training, {gamma} future tokens"):
            logits, tokens = _predictions(adapted, next(batches).to(target.device), gamma)
            optimizer.zero_grad()
            F.cross_entropy(logits.float(), tokens).backward()
            optimizer.step()
            schedule.step()
        merged = merge(adapted, packed=False)
        found = _teacher_forced(merged, data, gamma) | _written(merged, prompts, gamma)
        rows.append({"future tokens": gamma} | found)
    title = "The next token with the true future in view (Eq. 7, Figure 4)"
    return Result(title, rows, (Plot("future tokens", ("accuracy", "loss", "ROUGE-L")),))


def _predictions(target: Target, batch: Batch, gamma: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, V) logits and (M,) labels of the completion tokens, each with `gamma` tokens beyond it in
    view."""
    labels = future_tokens(batch, gamma)
    hidden = peek(target, batch.ids, labels.positions, labels.tokens)
    used = labels.next_tokens != NO_LABEL
    return target.logits(hidden[used]), labels.next_tokens[used]


def peek(
    target: Target, ids: torch.Tensor, positions: torch.Tensor, futures: torch.Tensor
) -> torch.Tensor:
    """States of a second row of each of the `positions`, which sees the tokens `futures` as well.

    ids: (B, T) context; positions: (B, P); futures: (B, P, gamma), the tokens of positions
    t + 2 ... t + 1 + gamma for a row t, negative for none. Returns (B, P, D), after the last layer.
    """
    (batch, length), (_, count, gamma) = ids.shape, futures.shape
    here = torch.arange(length, device=ids.device).expand(batch, -1)
    offsets = torch.tensor([*range(2, gamma + 2), 0], device=ids.device)
    groups = torch.cat([futures.clamp(min=0), ids.gather(1, positions).unsqueeze(-1)], -1)
    rows = torch.cat([ids, groups.flatten(1)], 1)
    places = torch.cat([here, (positions.unsqueeze(-1) + offsets).flatten(1)], 1)
    # A future token sees those before it. The second row of a position comes after them, sees all,
    # and stands for the first one, which it does not see.
    causal = causal_mask(length, ids.device)
    below = stream_mask(causal[positions], gamma + 1)
    below[:, gamma :: gamma + 1, :length].scatter_(-1, positions.unsqueeze(-1), False)
    real = F.pad(futures >= 0, (0, 1), value=True).flatten(1).unsqueeze(1)
    below[:, :, length:] &= real | torch.eye(real.shape[-1], dtype=torch.bool, device=ids.device)
    context = F.pad(causal.expand(batch, -1, -1), (0, real.shape[-1]))
    mask = torch.cat([context, below], 1)
    hidden = target.forward(rows, places, mask.unsqueeze(1), None).hidden[:, length:]
    return hidden.unflatten(1, (count, gamma + 1))[:, :, -1]


@torch.no_grad()
def _teacher_forced(target: Target, data: PromptCompletionData, gamma: int) -> dict[str, float]:
    loss = hits = count = 0
    for batch in data.val_dataloader():
        logits, tokens = _predictions(target, batch.to(target.device), gamma)
        loss += float(F.cross_entropy(logits.float(), tokens, reduction="sum"))
        hits += int((logits.argmax(-1) == tokens).sum())
        count += len(tokens)
    return {"loss": loss / count, "accuracy": hits / count}


@torch.no_grad()
def _written(target: Target, prompts: list[Prompt], gamma: int) -> dict[str, float]:
    """Metrics of answers written token by token, the reference's tokens in view."""
    answers, references = [], [list(prompt.references) for prompt in prompts]
    for prompt in track(prompts, description=f"writing, {gamma} future tokens"):
        sample = render_sample(target.tokenizer, prompt.text, prompt.references[0])
        ids, truth = sample.ids[: sample.prompt_length], sample.ids[sample.prompt_length :]
        answer: list[int] = []
        while len(answer) < Limits().max_new_tokens:
            ahead = truth[len(answer) + 1 :][:gamma]
            futures = torch.tensor([[ahead + [-1] * (gamma - len(ahead))]], dtype=torch.long)
            context = torch.tensor([ids + answer])
            last = torch.tensor([[context.shape[1] - 1]])
            hidden = peek(target, *(t.to(target.device) for t in (context, last, futures)))
            token = int(target.logits(hidden[0, 0]).argmax())
            if token in target.end_ids:
                break
            answer.append(token)
        answers.append(target.tokenizer.decode(answer, skip_special_tokens=True))
    return {
        "ROUGE-L": fmean(map(partial(rouge, "rougeL"), answers, references)),
        "exact match": fmean(map(sql_exact_match, answers, references)),
    }
