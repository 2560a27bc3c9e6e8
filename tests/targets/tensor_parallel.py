"""Run by torchrun in test_tensor_parallel.py: decode with a target that is split over processes."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.targets.loading import load_target

PROMPT, LIMITS = [3, 17, 5, 29, 11, 8, 3, 17], Limits(20)


def answers(**options) -> dict[str, object]:
    target = load_target(sys.argv[1], device="cpu", packed=False, **options)
    drafter = PromptLookup(max_ngram=2, num_tokens=4)
    engine = Engine(target, drafter, Sampling(), LIMITS, 6)
    return {
        "processes": target.num_parallel,
        "fingerprint": target.fingerprint,
        "plain": PlainDecoder(target, Sampling(), LIMITS).generate(PROMPT).ids,
        "drafted": engine.generate(PROMPT).ids,
    }


if __name__ == "__main__":
    found = answers(tensor_parallel=True)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({"split": found, "whole": answers()}))
    dist.barrier()
    dist.destroy_process_group()
