"""Ever larger targets: what is counted of answers that differ from plain decoding's."""

from studies.scale import _explained

from slipstream.evaluation.exactness import Divergence


def test_differences_that_do_not_come_again_are_no_ties():
    tie, wider = (Divergence("streams", 0, 3, 7, 8, gap, True) for gap in (0.125, 0.25))
    wrong = Divergence("streams", 1, 4, 7, 8, 9.0, False)
    found = _explained([tie, None, wrong, wider, None])
    assert found == {"ties": 2, "largest gap of ties": 0.25, "not seen again": 2}
    assert _explained([])["largest gap of ties"] is None
