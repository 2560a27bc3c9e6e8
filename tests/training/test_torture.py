"""A few of the kills of `make torture`."""

import pytest
from tests.torture import torture
from tests.torture_commands import KINDS


def test_kills_at_random_moments_lose_nothing():
    done = torture(["regeneration"], {"kills": 2, "terms": 1, "interrupts": 0}, 0, full=0)
    assert (done["SIGKILL"], done["SIGTERM"], done["bit-equal ends"]) == (2, 1, 1)


@pytest.mark.exhaustive
def test_every_kind_of_command_on_a_full_disk():
    counts = {"kills": len(KINDS), "terms": 0, "interrupts": 0}
    done = torture(list(KINDS), counts, 1, full=len(KINDS), in_a_row=1)
    assert done["bit-equal ends"] == len(KINDS)
    full = done["full disks"] + done["files at their limit"]
    assert full == len(KINDS)
