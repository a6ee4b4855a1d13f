"""`specexec train`: from a recipe to a draft that `run` takes, and what it says of wrong recipes and prompts."""

import json
from pathlib import Path

import pytest
from tiny import save, tiny_model
from tiny_tokenizer import tiny_tokenizer

from app.cli import main
from app.environment import cache_dir
from app.recipes import load_recipe, recipe_names

RECIPE = """
kind = "{kind}"
[data]
sequences = 12
held_out = 2
batch = 6
answer_tokens = 12
user_tokens = 6
features = "{features}"
[draft]
num_layers = 1
intermediate = 64
{own}
block_size = 4
markov_rank = 8
{more}
[train]
learning_rate = 3e-3
epochs = 4
batch = 2
anchors = 8
steps_ahead = 2
evaluate_prompts = 2
evaluate_tokens = 8
"""


OWN = """
layers = [0, 1, 2]
vocabulary = 200
"""


@pytest.fixture
def train(tmp_path, chat_model, capsys, monkeypatch):
    """Runs the command on a recipe; its exit code, its last line and what it said besides."""
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path / "cache"))

    def call(*arguments, kind="dflash", features="cached", more="", out="out", recipe=None):
        file = tmp_path / "recipe.toml"
        own = "" if kind == "mtp" else OWN
        file.write_text(RECIPE.format(kind=kind, features=features, own=own, more=more) if recipe is None else recipe)
        given = ("--recipe", file, "--target", chat_model, "--dtype", "float32", "--out", tmp_path / out)
        code = main(["train", *map(str, (*given, *arguments)), "--offline"])
        printed, said = capsys.readouterr()
        return code, printed, said

    return call


@pytest.mark.parametrize(
    ("kind", "features"),
    [("eagle3", "online"), ("mtp", "cached"), ("dflash", "cached"), ("dspark", "online"), ("distill", "online")],
)
def test_a_draft_is_trained_and_drafts(kind, features, train, tmp_path, chat_model, capsys):
    small = tmp_path / "small"
    save(tiny_model("llama", seed=4, num_hidden_layers=1), small)
    tiny_tokenizer().save_pretrained(small)
    more = f'model = "{small}"' if kind == "distill" else ""
    code, printed, said = train("--json", kind=kind, features=features, more=more)
    assert code == 0, said
    result = json.loads(printed)
    assert result["draft"] == str(tmp_path / "out" / "draft")
    assert result["acceptance_length"] >= 1
    assert "10 texts to train on, 2 held out" in said
    asked = [
        "run",
        "hello there",
        "--target",
        chat_model,
        "--dtype",
        "float32",
        "--max-tokens",
        16,
        "--offline",
        "--json",
    ]
    answers = []
    for draft in (result["draft"], f"graft:{result['draft']}", "none"):
        assert main([*map(str, asked), "--draft", draft, "--budget", "8"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["text"] == answers[1]["text"] == answers[2]["text"]
    assert answers[0]["drafted"] > 0 and answers[1]["drafted"] > 0
    assert list((cache_dir() / "texts").iterdir()), "repetitions of the grafted run are kept for later ones"
    (learned,) = (cache_dir() / "acceptance").glob("*.json")
    assert ("slots" in json.loads(learned.read_text())) == (kind in ("dflash", "dspark"))


def test_answers_to_given_prompts(train, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the cat {number}"}) + "\n" for number in range(6)))
    with prompts.open("a") as file:
        file.write("".join(json.dumps({"turns": [f"in the end {number}", "more"]}) + "\n" for number in range(6)))
    code, printed, said = train("--prompts", prompts)
    assert code == 0, said
    assert "10 texts to train on" in said
    assert "tokens a pass" in printed


def test_a_run_that_is_through_is_not_trained_again(train, tmp_path):
    assert train()[0] == 0
    before = (tmp_path / "out" / "curve.csv").read_text()
    code, _, said = train()
    assert code == 0 and "goes on from step 20" in said
    assert (tmp_path / "out" / "curve.csv").read_text() == before


def test_another_run_s_folder_is_refused(train):
    assert train()[0] == 0
    code, _, said = train(kind="dspark")
    assert code == 1
    assert "holds a run of another recipe" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        ("not json\n", "line 1: needs"),
        ('{"prompt": "a"}\n{"question": "b"}\n', "line 2: needs"),
        ('{"prompt": "a"}\n', "1 texts are too few"),
    ],
)
def test_prompts_that_are_none(content, says, train, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(content)
    code, _, said = train("--prompts", prompts)
    assert code == 1
    assert says in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("kind = 3", "kind must be eagle3 or mtp or dflash or dspark or distill, not 3"),
        ("[train]\nbatch = 2", "add kind ="),
        ('kind = "dflash"\n[train]\nbacth = 2', "unknown key 'bacth'; did you mean batch?"),
        ('kind = "dflash"\n[train]\nbatch = "2"', "batch must be a int, not '2'"),
        ('kind = "dflash"\n[draft]\nlayers = 2', "layers must be a list, not 2"),
        ('kind = "dflash"\ntrain = 2', "train must be a table, not 2"),
        ('kind = "dflash', "not readable TOML"),
        ('kind = "distill"', "needs draft.model"),
        ('kind = "mtp"\n[draft]\nvocabulary = 200', "leave out draft.vocabulary"),
        ('kind = "dflash"\n[draft]\nlayers = [0, 9]', "draft.layers [9]: the target has layers 0 to 3"),
    ],
)
def test_recipes_that_are_wrong(recipe, says, train):
    code, _, said = train(recipe=recipe)
    assert code == 1
    assert says in said.splitlines()[-1]


def test_recipes_of_the_package_are_whole():
    names = recipe_names()
    assert {"eagle3", "mtp", "dflash", "dspark", "distill", "demo-eagle3", "demo-dflash", "demo-dspark"} <= set(names)
    for name in names:
        assert load_recipe(name).kind == name.removeprefix("demo-")
    minutes = {load_recipe(name).train.max_minutes for name in names if name.startswith("demo-")}
    assert len(minutes) == 1 and None not in minutes
    with pytest.raises(ValueError, match="did you mean demo-dspark"):
        load_recipe("demo-dspak")
    with pytest.raises(FileNotFoundError, match="no recipe file"):
        load_recipe(str(Path("nowhere.toml")))
