"""What ships with the package: a small target, a smaller draft model, speculators, and prompts.

They exist so that everything can be tried, tested and measured without a download. Each folder has
a card (README.md) that tells data, licence, command and results.
"""

from pathlib import Path

PROMPTS = Path(__file__).parent / "prompts"
"""A folder for each kind of generated prompts, with a `.jsonl.gz` file for each split."""
SHIPPED = {
    f"slipstream/small-{kind}": f"small_{kind.replace('-', '_')}"
    for kind in ("target", "draft", "streaming", "streaming-paper", "sprinter", "acceptance")
}


def locate(name: str | Path) -> str | Path:
    """The folder of a shipped model, e.g. 'slipstream/small-target'; other names stay."""
    return Path(__file__).parent / SHIPPED[name] if name in SHIPPED else name
