"""Rows that ask for a text to be repeated: they teach a small model to copy.

A model trained from scratch on few tokens learns slowly to carry names and values from its prompt
into its answer. Random words, in no order a language model could guess, leave copying as the only
way. Only the recipe of the shipped target uses them.
"""

import random

from slipstream.data.rows import Row

FORMS = {"Repeat": str, "Repeat in lower case": str.lower, "Repeat with capitals": str.title}


def copying_rows(rows: list[Row], count: int, seed: int) -> list[Row]:
    """`count` rows of 3 to 20 random words of the prompts of `rows`, to be repeated in some form.

    Example: "Repeat in lower case: Redwood has area[riverside]," -> "redwood has area[riverside],".
    """
    generator = random.Random(seed)
    words = [word for row in rows for word in row.prompt_text.split()]
    made = []
    for _ in range(count):
        text = " ".join(generator.choices(words, k=generator.randint(3, 20)))
        form = generator.choice(list(FORMS))
        made.append(Row(f"{form}: {text}", FORMS[form](text), "copying"))
    return made
