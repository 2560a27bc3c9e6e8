"""What needs a CUDA device: exactness as on the CPU, and rows that cost next to nothing."""

import pytest
import torch
from tests.commands import config_of

from slipstream import app
from slipstream.evaluation.row_cost import row_costs
from slipstream.targets.loading import load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_method_gives_the_output_of_generate(tmp_path):
    records = app.infer(
        config_of("infer", "experiment=demo", "num_prompts=16", f"output_dir={tmp_path}")
    )
    for record in records:
        assert record.identical == record.num_prompts, record.method


def test_eight_rows_cost_little_more_than_one():
    costs = row_costs(load_target("slipstream/small-target", device="cuda"))
    assert costs[8] < 1.5 * costs[1]
