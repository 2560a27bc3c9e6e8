"""A few of the kills of `make torture`."""

import pytest
from tests.torture import torture
from tests.torture_commands import KINDS


@pytest.mark.exhaustive
def test_kills_at_random_moments_lose_nothing():
    done = torture(["regeneration"], {"kills": 2, "terms": 1, "interrupts": 0}, 0, full=0)
    assert (done["SIGKILL"], done["SIGTERM"], done["bit-equal ends"]) == (2, 1, 1)


@pytest.mark.exhaustive
def test_commands_on_a_full_disk():
    """Every third kind; `make torture` fills the disk of each."""
    kinds = list(KINDS)[::3]
    counts = {"kills": len(kinds), "terms": 0, "interrupts": 0}
    done = torture(kinds, counts, 1, full=len(kinds), in_a_row=1)
    assert done["bit-equal ends"] == len(kinds)
    full = done["full disks"] + done["files at their limit"]
    assert full == len(kinds)
