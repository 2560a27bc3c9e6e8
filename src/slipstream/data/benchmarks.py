"""Rows of benchmarks as their own files have them, told by their fields.

MT-Bench, Spec-Bench and its multilingual kin have questions of several turns (`turns`); MBPP,
HumanEval and ClassEval have programs to write. GSM8K, CNN/DailyMail and XSum are prompts with
completions. What stands around a task is the wording of the benchmark's paper.
"""

MBPP = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass "
    "these tests:\n\n{tests}\n"
)
CLASS_EVAL = "Please complete the class {class_name} in the following code.\n{skeleton}"


def as_row(record: dict) -> tuple[dict, list]:
    """`record` with the field `prompt`, and `completion` where one is known, and the questions that
    are asked after the answer; as it is, and none, if it is of no benchmark.

    >>> as_row({"turns": ["One?", "Two?"]})
    ({'turns': ['One?', 'Two?'], 'prompt': 'One?'}, ['Two?'])
    """
    turns, tests = record.get("turns"), record.get("test_list")
    if isinstance(turns, list) and turns and "prompt" not in record:
        return record | {"prompt": turns[0]}, turns[1:]
    if {"text", "code"} <= record.keys() and isinstance(tests, list):
        prompt = MBPP.format(text=record["text"], tests="\n".join(map(str, tests)))
        record = record | {"prompt": prompt, "completion": record["code"]}
    elif {"skeleton", "class_name", "solution_code"} <= record.keys():
        prompt = CLASS_EVAL.format_map(record)
        record = record | {"prompt": prompt, "completion": record["solution_code"]}
    elif {"prompt", "canonical_solution"} <= record.keys():
        record = {"completion": record["canonical_solution"]} | record
    return record, []
