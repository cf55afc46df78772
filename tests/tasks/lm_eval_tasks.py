"""Local lm-eval tasks: one of choices, one of generated answers, on a few documents written here."""

import json
from pathlib import Path

SUBJECTS = ("sky", "grass", "snow", "coal", "sea")
COLOURS = ("blue", "green", "white", "black", "blue-green")

CHOICES = """\
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""
GENERATED = """\
task: local_generate
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{choices[gold]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 6}}
metric_list:
  - metric: exact_match
"""


def write_tasks(folder: Path) -> Path:
    """A folder of both tasks, with their documents beside them."""
    tasks = folder / "tasks"
    tasks.mkdir()
    data = tasks / "documents.jsonl"
    documents = [
        {"question": f"{'Look around. ' * index}What colour is {subject}?", "choices": COLOURS, "gold": index}
        for index, subject in enumerate(SUBJECTS)
    ]
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, text in (("choice", CHOICES), ("generate", GENERATED)):
        (tasks / f"{name}.yaml").write_text(text.format(data=data, cache=folder / "cache"))
    return tasks
