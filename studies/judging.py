"""Which of two answers is better: judges, and FastChat's files for one that is not at hand.

SPRINTER's authors asked GPT-4 (section 4). By default the target itself is asked, by the mean
log-probability that it gives to the tokens of an answer. A judge is any object with `scores`: of
two answers to the same prompt the one with the larger score wins.
"""

import json
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from slipstream.data.labelled_drafts import states
from slipstream.decoding.answer import Generation
from studies import Prompt, Target
from studies.decoding import token_ids


@runtime_checkable
class Judge(Protocol):
    def scores(
        self, target: Target, prompts: list[Prompt], answers: list[Generation]
    ) -> list[float]:
        """A score for each answer."""


class TargetLikelihood:
    """The target's mean log-probability of an answer's tokens, at temperature 1."""

    @torch.inference_mode()
    def scores(
        self, target: Target, prompts: list[Prompt], answers: list[Generation]
    ) -> list[float]:
        found = []
        for ids, answer in zip(token_ids(target, prompts), answers, strict=True):
            text = ids + answer.ids[:-1]
            logs = target.logits(states(target, [text])[0, len(ids) - 1 :]).float().log_softmax(-1)
            found.append(logs[range(len(answer.ids)), answer.ids].mean().item())
        return found


def wins_of(ours: Sequence[float], theirs: Sequence[float]) -> np.ndarray:
    """100 for each prompt in which our score is larger, 50 for a tie: their mean is the win rate in
    percent.

    >>> wins_of([1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 5.0, 1.0]).mean().item()
    62.5
    """
    return 50 * (1 + np.sign(np.subtract(ours, theirs)))


def fastchat_files(prompts: list[Prompt], answers: dict[str, list[Generation]]) -> dict[str, str]:
    """What FastChat's `llm_judge` reads: question.jsonl, and model_answer/METHOD.jsonl of each."""
    files = {
        "question": [
            {"question_id": number, "category": prompt.source, "turns": [prompt.question]}
            for number, prompt in enumerate(prompts)
        ]
    }
    for name, generations in answers.items():
        files[f"model_answer/{name}"] = [
            {"question_id": number, "answer_id": f"{name}-{number}", "model_id": name,
             "choices": [{"index": 0, "turns": [answer.text]}], "tstamp": 0.0}
            for number, answer in enumerate(generations)
        ]  # fmt: skip
    return {
        f"fastchat/{name}.jsonl": "".join(json.dumps(record) + "\n" for record in records)
        for name, records in files.items()
    }
