"""Where repetition helps: tokens per pass of the demo model's drafts over prompts with long overlap and open ones.

    python benchmarks/drafters.py [--budgets 16,64] [--drafts self,ngram,suffix,graft] [--prompts edit,chat-sleep]
        [--max-tokens 160] [--dtype float32]

The prompts are in `benchmarks/drafters.jsonl`: an edit and a summary, whose answers repeat long parts of them, and
three open questions. Drafts know nothing of earlier runs. The last line printed is one JSON object: per budget and
prompt tokens per pass by draft, and graft_over_self.
"""

import argparse
import json
from pathlib import Path

from tokens_per_pass import add_options, flags_of, measure

from app.bench_prompts import read_questions

PROMPTS = Path(__file__).with_suffix(".jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="16,64")
    parser.add_argument("--drafts", default="self,ngram,suffix,graft")
    parser.add_argument("--prompts", default="edit,summarise,chat-weekend,chat-sleep,chat-letter")
    add_options(parser)
    parser.set_defaults(max_tokens="160")
    options = parser.parse_args()
    known = {question.question_id: question.turns[0] for question in read_questions(str(PROMPTS))}
    prompts = {name: known[name] for name in options.prompts.split(",")}
    report: dict[str, dict[str, dict[str, float]]] = {}
    for budget in map(int, options.budgets.split(",")):
        rows: dict[str, dict[str, float]] = {name: {} for name in prompts}
        for draft in options.drafts.split(","):
            for name, counts in measure(prompts, draft, budget, flags_of(options)).items():
                rows[name][draft] = counts["tokens"] / counts["passes"]
        for name, row in rows.items():
            if {"graft", "self"} <= set(row):
                row["graft_over_self"] = row["graft"] / row["self"]
            print(budget, name, {each: round(value, 2) for each, value in row.items()}, flush=True)
        report[str(budget)] = rows
    print(json.dumps({"dtype": options.dtype, "max_tokens": int(options.max_tokens), "budgets": report}))


if __name__ == "__main__":
    main()
