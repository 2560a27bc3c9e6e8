"""Write the prompts that ship with the package, or more of them, or others elsewhere:

python -m tools.synthetic [--train COUNT] [--validation COUNT] [--test COUNT] [--seed SEED]
[--folder FOLDER]; then e.g. data.path=[FOLDER/data_to_text,FOLDER/text_to_sql].
"""

import argparse
from pathlib import Path

from slipstream.assets import PROMPTS
from tools.synthetic import SHIPPED, write

parser = argparse.ArgumentParser(description=__doc__)
for split, count in SHIPPED.items():
    parser.add_argument(f"--{split}", type=int, default=count, help="prompts of each kind")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--folder", type=Path, default=PROMPTS)
chosen = parser.parse_args()
write(chosen.folder, {split: getattr(chosen, split) for split in SHIPPED}, chosen.seed)
