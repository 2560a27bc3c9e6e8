"""README.md and docs/ against the project: commands, Python, names, paths, links and the map.

Every command of a page runs at small size, those of one section in one folder, which has stand-ins
for the reader's own files. A server starts, and ends; the first one of a section once the Python
there has asked it. Where the page says beside a command that it "needs a GPU", "needs two devices"
or "needs the hub", its configuration alone is composed; with `target=hub` the shipped models stand
in for the hub's. Commands of docs/evidence are composed.
"""

import gzip
import importlib
import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import DictConfig, OmegaConf
from tests.commands import ROOT, config_of
from tests.pages import CODE, FENCE, PAGES, SECTIONS, TEXTS, Command, Section, sections_of
from tests.serving.conftest import ended, started

from slipstream import app
from slipstream.assets import PROMPTS
from slipstream.commands import Infer
from slipstream.configuration import check_config, own_part
from slipstream.core.errors import InputError
from slipstream.data.rows import read_rows
from slipstream.serving.server import Serve
from slipstream.training.command import Train

COMMANDS = {"train": Train, "infer": Infer, "serve": Serve}
FEW = {
    "tools.synthetic": "--train 2 --validation 2 --test 2 --folder invented",
    "tools.load": "--clients 1 2 --seconds 2 --rounds 1 --tokens 8 --overload 0.1",
}
"""What modules are given to do little."""
STAND_INS = ("target.name=slipstream/small-target", "target.dtype=float32")
"""For a model of the hub."""
SMALL = {
    "num_prompts": 1,
    "repeats": 1,
    "max_new_tokens": 8,
    "budgets": [2, 4],
    "samples": 2000,
    "max_rows": 4,
    "max_train_rows": 16,
    "max_validation_rows": 8,
    "generated_rows": 8,
    "copying_rows": 8,
    "batch_tokens": 1024,
    "validation_prompts": 1,
    "max_epochs": 1,
    "models": [
        dict(
            name="tiny",
            measured=True,
            batch_size=2,
            length=32,
            model_type="llama",
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
        )
    ],
}
"""What settings of these names, anywhere in a config, may be at most."""
QUICK = {
    "trainer.max_steps": 2,
    "trainer.val_check_interval": 1,
    "trainer.check_val_every_n_epoch": None,
    "trainer.limit_val_batches": 1,
    "trainer.precision": "32-true",
    "trainer.accelerator": "cpu",
}


FIRST = {each.text: name for name in reversed(SECTIONS) for each in SECTIONS[name].commands}
"""The section where a command stands first; there alone it is run, unless others build on it."""
OF_PAGES = [name for name in SECTIONS if not name.startswith("docs/evidence/")]


@pytest.fixture
def section(request, tmp_path, monkeypatch) -> Section:
    """A section, in an empty folder, with its files in their places."""
    section = SECTIONS[request.param]
    monkeypatch.chdir(tmp_path)
    for name, text in section.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".py":
            parent, _, own = ".".join(Path(name).with_suffix("").parts[1:]).rpartition(".")
            module = ModuleType(f"{parent}.{own}")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            monkeypatch.setattr(importlib.import_module(parent), own, module, raising=False)
            exec(compile(text, path, "exec"), module.__dict__)
    return section


def composed(command: Command, *more: str) -> DictConfig:
    """The config of a command; `InputError`, or Hydra's error, for what it does not know."""
    script, given = command.script, command.overrides
    if Path("conf").is_dir():
        given.append(f"hydra.searchpath=[file://{Path('conf').absolute()}]")
    own, other = COMMANDS[script], Infer if script == "train" else Train
    config = own_part(config_of(script, *given, *more), own, other)
    check_config(config, own)
    return config


@pytest.mark.parametrize(
    "section",
    [
        *OF_PAGES,
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in SECTIONS
            if name not in OF_PAGES
        ),
    ],
    indirect=True,
)
def test_every_command_composes(section):
    makefile = (ROOT / "Makefile").read_text()
    for command in section.commands:
        if command.script:
            if FIRST.get(command.text, section.name) == section.name:
                composed(command)
        elif command.text.startswith("make "):
            assert re.search(rf"^{command.text.split()[1]}:", makefile, re.M), command
        else:
            module = command.text.split()[2].replace(".", "/")
            assert (ROOT / module).is_dir() or (ROOT / f"{module}.py").exists(), command


@pytest.mark.exhaustive
@pytest.mark.parametrize("section", OF_PAGES, indirect=True)
def test_every_command_and_every_python_block_runs(section, monkeypatch):
    put_stand_ins(Path.cwd())
    typed = iter(["name[The Mill], food[English]", ""])  # of a conversation
    monkeypatch.setattr("builtins.input", lambda *_: next(typed, ""))
    first = next((each for each in section.commands if each.script == "serve"), None)
    with serving(first) if first else nullcontext("") as url:
        for block in section.python:
            block = block.replace("http://127.0.0.1:8000", url or "http://127.0.0.1:8000")
            exec(compile(block, section.name, "exec"), {"__name__": "__main__"})
    modules = set()
    for command in section.commands:
        if command is first:
            continue
        if FIRST[command.text] != section.name and "output_dir=" not in command.text:
            continue
        if command.text.startswith("make "):
            for step in steps_of_make(command):
                run(step)
        elif command.script:
            run(command)
        elif not command.needs:
            module = command.text.split()[2]
            if module in modules:  # which would be asked for the same once more
                continue
            modules.add(module)
            monkeypatch.setattr(sys, "argv", [module, *FEW[module].split()])
            runpy.run_module(module, run_name="__main__")
            if module == "tools.synthetic":
                assert len(list(Path("invented").rglob("*.jsonl.gz"))) == 6


@contextmanager
def serving(command: Command) -> Iterator[str]:
    """A server at work, on a free port; its URL."""
    given = [word for word in command.overrides if not word.startswith("port=")]
    stand_ins = STAND_INS if "target=hub" in given else ()
    running = started(Path.cwd(), *given, *stand_ins)
    try:
        yield running.url
    finally:
        ended(running)


def run(command: Command) -> None:
    """Run a command at small size, in the working folder."""
    stand_ins = STAND_INS if "target=hub" in command.overrides else ()
    if command.needs and (not stand_ins or "a GPU" in command.needs):
        return
    if command.script == "serve":
        with serving(command):
            return
    if any(word.startswith("draft=") for word in command.overrides) and stand_ins:
        stand_ins = *stand_ins, "draft=slipstream/small-draft"
    config = composed(command, *stand_ins)
    shrink(config)
    for key, value in QUICK.items():
        group, name = key.split(".")
        if name in config.get(group, ()):
            config[group][name] = value
    if command.script == "train":
        config.logger = {"csv": config.logger.csv}
    if not any(word.startswith("output_dir=") for word in command.overrides):
        config.output_dir = tempfile.mkdtemp(dir=".")
    found = getattr(app, command.script)(config)
    assert not (config.get("verify") and found), command.text


def shrink(node: DictConfig) -> None:
    """Make every setting that `SMALL` names small enough."""
    for name in node:
        if OmegaConf.is_interpolation(node, name) or OmegaConf.is_missing(node, name):
            continue
        value, most = node[name], SMALL.get(name)
        if isinstance(value, DictConfig):
            shrink(value)
        elif most is not None and (value is None or isinstance(most, list) or value > most):
            node[name] = most


def steps_of_make(command: Command) -> list[Command]:
    """The calls of train.py and infer.py that make would run."""
    done = subprocess.run(
        ["make", "--dry-run", command.text.split()[1]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace("\\\n", " ").splitlines()
    return [Command(each[0]) for line in lines if (each := re.search(r"python \w+\.py .*", line))]


def put_stand_ins(folder: Path) -> None:
    """Small files in the place of a reader's own rows and of copies of public data sets."""
    for kind, names in (("data_to_text", ("my_data", "e2e_nlg")), ("text_to_sql", ("wikisql",))):
        for split in ("train", "validation", "test"):
            prompts = [row.prompt for row in read_rows(PROMPTS / kind, split, False)][:48]
            rows = [
                json.dumps({"prompt": prompt, "completion": f"It is {prompt.split()[-1]}."})
                for prompt in prompts
            ]
            for name in names:
                (folder / name).mkdir(exist_ok=True)
                with gzip.open(folder / name / f"{split}.jsonl.gz", "wt") as file:
                    file.write("\n".join(rows))
    (folder / "spec_bench").mkdir()
    questions = [
        json.dumps({"question_id": number, "category": "writing", "turns": [f"Write {number}."]})
        for number in range(8)
    ]
    (folder / "spec_bench" / "questions.jsonl").write_text("\n".join(questions))


GROUPS = sorted(path.name for path in (ROOT / "conf").iterdir() if path.is_dir())


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_a_config_exists(path):
    """Also where it stands in a sentence: `experiment=demo`."""
    pattern = rf"(?<=[` '])({'|'.join(GROUPS)})=(\[[\w,/]+\]|[a-z0-9_/]+\b(?!,\s*\w+=))"
    for group, names in re.findall(pattern, TEXTS[path]):
        for name in names.strip("[]").split(","):
            exists = (ROOT / "conf" / group / f"{name}.yaml").exists()
            assert exists or f"# conf/{group}/{name}.yaml" in TEXTS[path], f"{group}={name}"


def keys_of(node: object) -> set[str]:
    """All keys in a config, at any depth."""
    if not isinstance(node, dict):
        return set()
    return set(map(str, node)).union(*map(keys_of, node.values()))


@cache
def known_keys() -> set[str]:
    """Those of all configs, and the names of these."""
    files = [*(ROOT / "conf").rglob("*.yaml")]
    known = {"NAME", "searchpath", *GROUPS, *(each.stem for each in files)}
    return known.union(*(keys_of(OmegaConf.to_container(OmegaConf.load(each))) for each in files))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_key_in_a_sentence_is_one_of_a_config(path):
    """Such as `drafter.keep=true`."""
    for key in re.findall(r"`\+?(\w+(?:\.\w+)+)=", FENCE.sub("", TEXTS[path])):
        assert set(key.split(".")) <= known_keys(), key


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_exists_and_has_the_names_that_it_is_said_to_have(path):
    """`core/growth.py`: `grow`, `other` says that both stand in that file; in the tables of
    architecture.md the names stand in the next cell."""
    known = [ROOT, ROOT / "src" / "slipstream", ROOT / "tests"]
    text = FENCE.sub("", TEXTS[path])
    for name, rest in re.findall(
        r"`([\w./]+\.(?:py|yaml))`((?:(?:[:,]| \|)? (?:and )?`\w+`)*)", text
    ):
        found = [folder / name for folder in known if (folder / name).exists()]
        if "NAME" in name or name == "repeat.py":
            continue
        assert found, f"{name} does not exist"
        if rest.startswith(":" if path.stem != "architecture" else (":", " |")):
            words = set(re.findall(r"\w+", found[0].read_text(encoding="utf-8")))
            assert set(CODE.findall(rest)) <= words, f"{name}: {rest}"


def test_every_name_in_the_architecture_exists():
    text = FENCE.sub("", TEXTS[ROOT / "docs" / "architecture.md"])
    sources = [
        path for top in ("src", "studies", "tests", "conf") for path in (ROOT / top).rglob("*")
    ]
    words = {path.stem for path in sources} | {"NAME", "src", "studies", "tests"}
    for path in sources:
        if path.suffix in (".py", ".yaml"):
            words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    named = {word for each in re.findall(r"`([\w.]+)`", text) for word in each.split(".")}
    assert named - words - {"py", "md", "toml", "yaml"} == set()


def anchors_of(path: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", path.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", TEXTS[path])):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), link
        assert not anchor or anchor in anchors_of(place), link


def test_the_readme_is_short():
    assert len(TEXTS[ROOT / "README.md"].splitlines()) <= 250


@pytest.mark.parametrize("group", ["drafter", "length"])
def test_every_drafter_and_every_rule_is_explained(group):
    text = TEXTS[ROOT / "docs" / "drafters.md"]
    for path in (ROOT / "conf" / group).glob("*.yaml"):
        assert re.search(rf"^\|.*`{path.stem}`.* \|", text, re.M), path.stem


def paths_of(text: str) -> list[str]:
    """The paths that an indented map names, folders with a slash at the end."""
    found, above = [], []
    for line in text.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        above = [*above[:depth], name]
        found.append("".join(above))
    return found


def test_the_map_is_the_tree():
    """All folders, and all source files of the package, of studies and of the root."""
    text = TEXTS[ROOT / "docs" / "architecture.md"]
    (drawn,) = (block for _, block in FENCE.findall(text) if block.startswith("train.py"))
    tops = [path for path in ROOT.iterdir() if f"{path.name}/" in drawn or path.name == "src"]
    kept = [
        path.relative_to(ROOT)
        for top in tops
        for path in top.rglob("*.*")
        if "__pycache__" not in path.parts and path.suffix != ".pyc"
    ]
    kept = [path for path in kept if not any(part.endswith(".egg-info") for part in path.parts)]
    closed = ("src/slipstream/assets/", "docs/evidence/")  # what is in them is not named
    folders = {f"{parent.as_posix()}/" for path in kept for parent in path.parents}
    folders = {name for name in folders if not any(n in name and n != name for n in closed)}
    files = {path.as_posix() for path in kept if path.suffix == ".py"}
    files = {name for name in files if name.startswith(("src/", "studies/"))}
    files = {name for name in files if not name.endswith("__init__.py")}
    files |= {path.name for path in ROOT.glob("*.py")}
    expected = (folders | files) - {"./", "src/"}
    named = paths_of(drawn)
    assert sorted(named) == sorted(set(named)), "a path is named twice"
    assert set(named) - expected == set(), "the map names what does not exist"
    assert expected - set(named) == set(), "the map does not name"


SAMPLE = """# Page
Then `python infer.py drafter=unispec budget=4`, or `make demo`; a table needs nothing.
```bash
python infer.py a=1  # needs a GPU
# needs the hub, and patience
python train.py b=2
python train.py c=3

make test
```
"""


def test_commands_are_found_with_what_they_need():
    (section,) = sections_of("page", SAMPLE)
    assert section.commands == [
        Command("python infer.py a=1", "needs a GPU"),
        Command("python train.py b=2", "needs the hub, and patience"),
        Command("python train.py c=3", "needs the hub, and patience"),
        Command("make test"),
        Command("python infer.py drafter=unispec budget=4"),
        Command("make demo"),
    ]


@pytest.mark.parametrize("given", ["drafter=unispec drafter.no_such=1", "+num_prompt=3"])
def test_a_wrong_key_is_noticed(given):
    with pytest.raises(InputError, match="unknown config key"):
        composed(Command(f"python infer.py {given.replace('drafter.no', '+drafter.no')}"))
