"""README.md and docs/ as tests read them: sections with their commands, Python blocks and files."""

import re
import shlex
from dataclasses import dataclass, field

from tests.commands import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"python (train|infer|serve)\.py|python -m [\w.]+|torchrun |make [a-z-]+$")
NEEDS = re.compile(r"needs (the hub|a GPU|two devices).*")


@dataclass(frozen=True)
class Command:
    """A command as a page has it. needs: what the page says beside it, '' for nothing."""

    text: str
    needs: str = ""

    @property
    def script(self) -> str | None:
        """'train', 'infer' or 'serve', None for other commands."""
        found = re.search(r"\b(train|infer|serve)\.py", self.text)
        return found and found[1]

    @property
    def overrides(self) -> list[str]:
        """What the script is given; in a multirun, the first run."""
        words = shlex.split(self.text)
        given = words[1 + next(n for n, word in enumerate(words) if word.endswith(".py")) :]
        if "-m" in given:
            given.remove("-m")
            given = [re.sub(r"^([^=\[]+=[^,\[]*),.*", r"\1", word) for word in given]
        return [word for word in given if not word.startswith("hydra.sweep")]


@dataclass
class Section:
    """The code of one section of a page. files: blocks that are files of the project, by path."""

    name: str
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    python: list[str] = field(default_factory=list)


def sections_of(page: str, text: str) -> list[Section]:
    """The sections of a page that have code to run."""
    blocks = FENCE.findall(text)
    numbered = iter(range(len(blocks)))
    text = FENCE.sub(lambda _: f"\0{next(numbered)}\0", text)
    found = []
    for part in re.split(r"^(?=#+ )", text, flags=re.M):
        section = Section(f"{page}: {part.partition(chr(10))[0].lstrip('# ')}")
        for number in re.findall("\0(\\d+)\0", part):
            language, block = blocks[int(number)]
            head = re.match(r"# (\S+\.(?:py|yaml))\n", block)
            if language in ("python", "yaml") and head:
                section.files[head[1]] = block
            elif language == "python":
                section.python.append(block)
            elif language == "bash":
                section.commands += _commands_of_block(block)
        for sentence in re.split(r"(?<=[.|]) ", part):
            needs = NEEDS.search(sentence)
            codes = filter(COMMAND.match, CODE.findall(sentence))
            section.commands += [Command(code, needs[0] if needs else "") for code in codes]
        found.append(section)
    return [each for each in found if each.commands or each.files or each.python]


def _commands_of_block(block: str) -> list[Command]:
    """A remark above commands is of all of them up to an empty line; one behind is of its own."""
    found, above = [], ""
    for line in block.splitlines():
        if not line.strip() or line.startswith("#"):
            needs = NEEDS.search(line)
            above = needs[0] if needs else ""
            continue
        words, _, remark = line.partition("  #") if "  #" in line else (line, "", "")
        needs = NEEDS.search(remark)
        found.append(Command(words.strip(), needs[0] if needs else above))
        assert COMMAND.match(found[-1].text), f"unknown command: {line}"
    return found


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EVIDENCE = sorted((ROOT / "docs" / "evidence").glob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in [*PAGES, *EVIDENCE]}
SECTIONS = {
    section.name: section
    for path in [*PAGES, *EVIDENCE]
    for section in sections_of(str(path.relative_to(ROOT)), TEXTS[path])
}
