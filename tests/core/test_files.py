"""A file is replaced as a whole, or not at all."""

import errno
import os
import resource
import signal
import stat
import threading
import time

import pytest
import torch

from slipstream.assets import locate
from slipstream.core import files
from slipstream.core.errors import what_is
from slipstream.core.files import (
    SUMS,
    appended,
    is_intact,
    line_of,
    lines_of,
    load_tensors,
    locked,
    replaced_folder,
    save_tensors,
    tidy,
    write_atomically,
    write_json,
    write_text,
)


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "new" / "file"
    for content in (b"first", b"second"):
        write_atomically(path, lambda file, content=content: file.write(content))
        assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["file"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_write_that_fails_in_the_middle_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"half of")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, write)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_texts_and_json_end_as_they_should(tmp_path):
    write_text(tmp_path / "text", "é")
    write_json(tmp_path / "json", {"a": [1]})
    assert (tmp_path / "text").read_bytes() == "é".encode()
    assert (tmp_path / "json").read_text() == '{\n  "a": [\n    1\n  ]\n}\n'


def test_a_folder_is_replaced_when_the_new_one_is_complete(tmp_path):
    path = tmp_path / "new" / "folder"
    for content in ("first", "second"):
        with replaced_folder(path) as made:
            (made / content).write_text(content)
            assert not (path / content).exists()
        assert sorted(os.listdir(path)) == [SUMS, content]
    assert os.listdir(path.parent) == ["folder"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_folder_that_is_not_finished_leaves_the_old_one(tmp_path, error):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(type(error)), replaced_folder(path) as made:
        (made / "half").touch()
        raise error
    assert os.listdir(path) == ["old"] and os.listdir(tmp_path) == ["folder"]


def test_lines_are_added_and_a_torn_tail_is_cut_off_with_a_sentence(tmp_path, capsys):
    path = tmp_path / "new" / "lines"
    with appended(path) as add:
        add("one")
    assert capsys.readouterr().out == ""
    path.write_bytes(path.read_bytes() + b"tw")
    with appended(path) as add:
        add("two")
    assert path.read_text() == "one\ntwo\n"
    assert "its last 2 bytes were cut off" in capsys.readouterr().out


def test_tensors_come_back_and_a_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "state"
    save_tensors(path, {"a": torch.arange(1000), "b": [1, 2]})
    assert load_tensors(path)["b"] == [1, 2]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # `torch.load` takes it for a number
    path.write_bytes(content)
    with pytest.raises(OSError, match="is damaged"):
        load_tensors(path)
    path.write_bytes(content[:-100])
    with pytest.raises(OSError, match="is damaged"):
        load_tensors(path)


def test_a_full_disk_is_called_so(tmp_path):
    """PyTorch's own error does not name it; the file of before stays."""
    path, limits = tmp_path / "state", resource.getrlimit(resource.RLIMIT_FSIZE)
    save_tensors(path, {"a": torch.zeros(10)})
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            save_tensors(path, {"a": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["state"]


def test_lines_that_are_damaged_are_left_out(tmp_path):
    path = tmp_path / "lines"
    lines = [line_of({"n": n, "x": [0.1, "é"]}) for n in range(4)]
    lines[1] = lines[1].replace('"n": 1', '"n": 7')
    lines[2] = lines[2][:-5]
    path.write_text("\n".join([*lines, '{"n": 4}', "5"]))
    assert [each["n"] for each in lines_of(path)] == [0, 3, 4]
    assert lines_of(tmp_path / "none") == []


def test_a_file_of_a_folder_is_checked(tmp_path):
    with replaced_folder(tmp_path / "folder") as made:
        (made / "a").write_text("a")
    assert is_intact(tmp_path / "folder" / "a")
    (tmp_path / "folder" / "a").write_text("b")
    assert not is_intact(tmp_path / "folder" / "a")
    (tmp_path / "folder" / SUMS).unlink()  # an older folder
    assert is_intact(tmp_path / "folder" / "a")


def test_a_lock_is_waited_for_or_not(tmp_path):
    path, order = tmp_path / "lock", []

    def second():
        with locked(path, "x") as own:
            order.append(own)

    with locked(path, "x") as own, locked(path, "x", wait=False) as other:
        assert own and not other
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", True] and not path.exists()


def killed(write) -> None:
    """Run `write` in a process that SIGKILL ends when it calls what is given to it."""
    if (child := os.fork()) == 0:
        write(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_what_killed_processes_left_is_tidied(tmp_path):
    """A half-written file goes; a folder that was moved away and not replaced comes back; what a
    running process writes stays."""
    with replaced_folder(tmp_path / "below" / "model") as made:
        (made / "weights").write_text("old")

    def replace(kill):
        os.replace = lambda *paths: rename(*paths) if paths[1].name == "old" else kill()
        with replaced_folder(tmp_path / "below" / "model"):
            pass

    rename = os.replace
    killed(lambda kill: write_atomically(tmp_path / "a.b", kill))
    killed(replace)
    assert not (tmp_path / "below" / "model").exists()
    others = tmp_path / f".c.{os.getppid()}.unfinished"
    others.touch()
    tidy(tmp_path)
    assert (tmp_path / "below" / "model" / "weights").read_text() == "old"
    assert set(tmp_path.rglob(".*")) == {others} and not (tmp_path / "a.b").exists()


def test_a_new_file_of_lines_is_in_its_folder_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "_sync", synced.append)
    with appended(tmp_path / "new" / "lines"):
        assert synced == [tmp_path / "new"]


def test_folders_that_are_taken_for_one_another_are_told_apart(tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (run / "model" / "config.json").write_text("{")
    (run / "best.ckpt").touch()
    found = [what_is(path) for path in (run, tmp_path / "adapter", run / "best.ckpt")]
    assert [each.partition(",")[0] for each in found] == [
        "the folder of a run", "an adapter", "a checkpoint",
    ]  # fmt: skip
    assert str(run / "model") in found[0]
    for name, kind in (("small-target", "a language model"), ("small-streaming", "a speculator")):
        assert what_is(locate(f"slipstream/{name}")).startswith(f"{kind}, which")
    for other in (run / "model", tmp_path, "owner/name", "a" * 300, "none.ckpt"):
        assert what_is(other) == ""
