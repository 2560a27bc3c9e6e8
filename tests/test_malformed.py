"""A table of malformed input: each ends with one sentence that names the field, before weights are
loaded, and with nothing written."""

import time
from functools import wraps

import pytest
from tests.exhaustive import sparing
from tests.malformed import SCHEMAS, composed, compositions, malformed, spoiled

from slipstream import app
from slipstream.core.errors import InputError
from slipstream.core.settings import arguments_of
from slipstream.targets import loading

SECONDS = 20
TABLE = {command: list(compositions(command)) for command in SCHEMAS}


class Loaded(Exception):
    """Weights were loaded."""


@pytest.fixture
def no_weights(monkeypatch):
    real = loading.load_target

    @wraps(real)
    def load_target(*args, **kwargs):
        raise Loaded

    monkeypatch.setattr(loading, "load_target", load_target)


def refused(command, config, key, output):
    """Whether the command ends as it should; else what it did."""
    started = time.perf_counter()
    try:
        getattr(app, command)(config)
        said = "nothing was said"
    except InputError as error:
        said = str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    name = key.rpartition(".")[2]
    good = name in said and "\n" not in said and not output.exists()
    return None if good and time.perf_counter() - started < SECONDS else said


@pytest.mark.parametrize(
    ("command", "every"),
    sparing(
        [(command, every) for command in SCHEMAS for every in (1, 23)],
        lambda command, every: every > 1,
    ),
)
def test_every_key_is_checked_before_weights_are_loaded(
    tmp_path, no_weights, capsys, command, every
):
    output, seen, count, wrong = tmp_path / "out", set(), 0, []
    for overrides in TABLE[command] if every == 1 else TABLE[command][:1]:
        config = composed(command, overrides, str(output))
        for key, value in list(malformed(command, config, seen))[::every]:
            count += 1
            found = refused(command, spoiled(config, key, value), key, output)
            if found is not None:
                wrong.append((overrides, key, value, found))
    with capsys.disabled():
        print(f"{command}.py: {count - len(wrong)} of {count} malformed values are refused")
    assert not wrong, wrong[:20]
    assert count >= (20 if every > 1 else 300)


def test_annotations_of_the_project_say_what_is_allowed():
    """None of a constructor that a config names is one that could not be read."""
    unread = []
    for command in SCHEMAS.values():
        for name, (adapter, _, _) in arguments_of(command).items():
            if "Any" in repr(adapter):
                unread.append((command, name))
    assert not unread
