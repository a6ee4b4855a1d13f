"""Training: losses equal slow ones, drafts really learn, and neither a kill nor a second process changes the curve."""

import json
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lessons import LAYERS, STOP, Lesson, changed, curve, spoken, sure_model, task
from safetensors.torch import load_file, save_file
from tiny import VOCAB
from torch.nn import functional as F

from app.heads import open_head
from specexec.budget import Budget
from specexec.drafters.dspark import DSparkNet
from specexec.engine import generate
from specexec.lm import CachedLM, as_ids
from specexec.sampling import SamplingParams, make_sampler
from specexec.training import losses
from specexec.training.answers import Manner, speak
from specexec.training.batches import TargetHead, collate
from specexec.training.corpus import Corpus, frequent, make_corpus, shard_path
from specexec.training.nets import feature_layers, public_config, public_tensors
from specexec.training.objectives import level, make_objective

LESSONS = Path(__file__).parent / "lessons.py"


@pytest.fixture(scope="module")
def model():
    return sure_model()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def corpus(model, texts):
    return spoken(texts, model)


def exact_batch(corpus, model, numbers=(0, 1, 2)):
    """Features as the model has them, not rounded to bf16 as they are stored."""
    texts = [replace(corpus.text(number), features=None, final=None) for number in numbers]
    return collate(texts, list(numbers), model=model, layers=LAYERS)


def rows(seed, count=7, width=11):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


# Corpus


def test_answers_are_those_of_the_library_whatever_stands_beside_them(model):
    prompts = [[5, 9, 30], [7, 8, 9, 10, 11, 12, 13], [40]]
    made = speak(model, prompts, Manner(10, (0.0,), STOP), generator=torch.Generator())
    for prompt, speech in zip(prompts, made, strict=True):
        alone = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=10, do_sample=False
        )
        assert speech.ids.tolist() == alone[0].tolist()
        assert speech.start == len(prompt)


def test_a_user_s_words_are_made_up_then_bridged_then_answered(model):
    manner = Manner(6, (0.0, 0.8), STOP, bridge=(300, 301, 302), user_tokens=5)
    made = speak(model, [[4, 5]] * 6, manner, generator=torch.Generator().manual_seed(3))
    for speech in made:
        words = speech.ids[2 : speech.start - 3]
        assert 0 <= len(words) <= 5 and not {300, *STOP} & set(words.tolist())
        assert speech.ids[speech.start - 3 : speech.start].tolist() == [300, 301, 302]
        assert len(speech.ids) == speech.start + 6 or speech.ids[-1] in STOP
    assert len({tuple(speech.ids.tolist()) for speech in made}) > 1


def test_features_beside_the_answers_are_those_of_a_plain_pass(corpus, model):
    for number in (0, 3, 15):
        text = corpus.text(number)
        output = model(torch.tensor(text.ids)[None], output_hidden_states=True)
        expected = torch.cat([output.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(text.features[:-1].float(), expected[:-1], rtol=0.01, atol=0.05)
        torch.testing.assert_close(text.final[:-1].float(), output.hidden_states[-1][0, :-1], rtol=0.01, atol=0.05)
        online = exact_batch(corpus, model, (number,))
        torch.testing.assert_close(online.features[0], expected, rtol=1e-4, atol=1e-4)


def test_a_lost_shard_is_made_again_as_it_was_and_others_are_left(model, tmp_path):
    spoken(tmp_path, model)
    first, second = (shard_path(tmp_path, number) for number in (0, 1))
    content, age = load_file(second), first.stat().st_mtime_ns
    second.unlink()
    spoken(tmp_path, model)
    again = load_file(second)
    assert content.keys() == again.keys()
    assert all(torch.equal(again[name], content[name]) for name in content)
    assert first.stat().st_mtime_ns == age


def test_texts_made_otherwise_are_refused(model, tmp_path):
    spoken(tmp_path, model)
    with pytest.raises(ValueError, match="made otherwise"):
        make_corpus(model, task(about="another's"), tmp_path, progress=lambda *_: None)
    with pytest.raises(ValueError, match="lacks layers"):
        make_corpus(model, task(layers=(0, 3)), tmp_path, progress=lambda *_: None)
    with pytest.raises(ValueError, match="holds no texts"):
        Corpus(tmp_path / "nothing")


def test_the_vocabulary_is_what_the_answers_say_most(corpus):
    counts = corpus.counts([0, 1], VOCAB)
    said = [token for number in (0, 1) for token in corpus.text(number).ids[corpus.text(number).start :].tolist()]
    assert {token: counts[token] for token in said} == {token: said.count(token) for token in said}
    assert counts.sum() == len(said)
    assert frequent(np.array([3, 0, 9, 3, 1]), 3).tolist() == [0, 2, 3]


def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(model, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="could not be written") as failure:
            make_corpus(model, task(), tmp_path, progress=lambda *_: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(failure.value)
    assert list(tmp_path.iterdir()) == []


# Losses


def test_losses_equal_those_written_out():
    draft, target, confidence = rows(1), rows(2), rows(3)[:, 0]
    p, q = target.double().softmax(-1).numpy(), draft.double().softmax(-1).numpy()
    soft, gap = -(p * np.log(q)).sum(-1), np.abs(p - q).sum(-1)
    np.testing.assert_allclose(losses.soft_cross_entropy(draft, target), soft, rtol=1e-5)
    np.testing.assert_allclose(losses.distance(draft, target), gap, rtol=1e-5)
    labels = torch.arange(7)
    hard = -np.log(q[np.arange(7), np.arange(7)])
    for share in (0.0, 0.3, 1.0):
        mixed = share * soft + (1 - share) * hard
        np.testing.assert_allclose(losses.guess_loss(draft, target, labels, share), mixed, rtol=1e-5)
    sure, wanted = 1 / (1 + np.exp(-confidence.double().numpy())), 1 - gap / 2
    expected = -(wanted * np.log(sure) + (1 - wanted) * np.log(1 - sure))
    np.testing.assert_allclose(losses.confidence_loss(confidence, torch.from_numpy(gap).float()), expected, rtol=1e-5)
    np.testing.assert_allclose(losses.slot_weights(3, 4.0), np.exp([0, -0.25, -0.5]), rtol=1e-6)


def test_parts_add_up_with_their_gradients(monkeypatch):
    draft, target = rows(1).requires_grad_(), rows(2)
    whole = losses.in_parts(lambda *each: losses.distance(*each).sum(), draft, target)
    whole.backward()
    gradient, draft.grad = draft.grad, None
    monkeypatch.setattr(losses, "_PART", 3)
    parts = losses.in_parts(lambda *each: losses.distance(*each).sum(), draft, target)
    parts.backward()
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(draft.grad, gradient)


def loud(net):
    """Weights far enough from their start that everything about a net counts."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "size"), [("eagle3", None), ("eagle3", 200), ("mtp", None)])
def test_recurrent_drafts_learn_on_what_they_read_when_they_draft(corpus, model, kind, size):
    recipe = changed(kind, decay=0.8)
    vocabulary = None if size is None else frequent(corpus.counts(range(16), VOCAB), size)
    objective = make_objective(recipe, model, vocabulary, mask_token=7)
    loud(objective.net)
    batch = exact_batch(corpus, model, (0, 1))
    lm = CachedLM(model, 64)
    head, own = objective.drafter(lm).head, TargetHead(model, vocabulary)
    columns = slice(None) if vocabulary is None else torch.from_numpy(vocabulary)
    loss = weight = 0.0
    for number in (0, 1):
        text = corpus.text(number)
        for root in range(1, len(text.ids) - 1):  # the pair of features before it and itself guesses the next token
            context = as_ids(text.ids[: root + 1])
            lm.prefill(context[:-1])
            guesses = [head.prefill(context)[0]]
            for step in range(1, 3):
                if root + step < len(text.ids):
                    node = as_ids(text.ids[root + step : root + step + 1])
                    guesses.append(head.extend(node, np.array([step - 2]))[0])
            for step, logits in enumerate(guesses):
                place = root + 1 + step
                said = text.start <= place < len(text.ids) and int(own.places(torch.tensor(text.ids[place]))) >= 0
                if not said:
                    continue
                target = own(batch.final[number, place - 1])
                loss += 0.8**step * float(-(target.softmax(-1) * logits[columns].log_softmax(-1)).sum())
                weight += 0.8**step
    sums = objective(batch)
    np.testing.assert_allclose(sums[:2].tolist(), [loss, weight], rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_block_drafts_learn_on_what_they_read_when_they_draft(corpus, model, kind, head):
    if kind == "dflash" and head != "vanilla":
        pytest.skip("DFlash has no Markov head")
    recipe = changed(kind, anchors=100, soft=0.5)
    recipe = replace(recipe, draft=replace(recipe.draft, markov_head=head))
    vocabulary = frequent(corpus.counts(range(16), VOCAB), 200)
    objective = make_objective(recipe, model, vocabulary, mask_token=7)
    loud(objective.net)
    net, own = objective.net, TargetHead(model, vocabulary)
    batch = exact_batch(corpus, model, (0, 1))
    lm = CachedLM(model, 64)
    run = objective.drafter(lm)._pass
    expected = np.zeros(2)
    for number in (0, 1):
        text = corpus.text(number)
        for anchor in range(text.start - 1, len(text.ids) - 1):
            context = as_ids(text.ids[: anchor + 1])
            lm.prefill(context[:-1])
            hidden = run.hidden(context)
            base, state = run.logits(hidden), torch.zeros(0 if head != "rnn" else 16)
            for slot in range(len(hidden)):
                before, place = torch.tensor(text.ids[anchor + slot : anchor + slot + 1]), anchor + 1 + slot
                logits = base[slot]
                if isinstance(net, DSparkNet) and place <= len(text.ids):
                    correction, state = net.correct(before[0], hidden[slot], state)
                    logits = logits + correction
                if place >= len(text.ids) or (label := int(own.places(torch.tensor(text.ids[place])))) < 0:
                    continue
                target = own(batch.final[number, place - 1])
                p, q = target.softmax(-1), logits.softmax(-1)
                loss = 0.5 * float(-(p * q.log()).sum()) - 0.5 * float(q[label].log())
                if isinstance(net, DSparkNet):
                    gap = float((p - q).abs().sum())
                    sure = net.confidence(before[0], hidden[slot])
                    wanted = torch.tensor(1 - gap / 2)
                    loss = 0.1 * loss + 0.9 * gap + float(F.binary_cross_entropy_with_logits(sure, wanted))
                expected += np.exp(-slot / 4) * np.array([loss, 1.0])
    sums = objective(batch)
    np.testing.assert_allclose(sums[:2].tolist(), expected, rtol=1e-4)


def test_levelled_features_count_alike(corpus, model):
    net = make_objective(changed(), model, None, mask_token=7).net
    batch = exact_batch(corpus, model)
    before = net.fc.weight.clone()
    level(net, [batch])
    sizes = (before / net.fc.weight)[0]
    places = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    torch.testing.assert_close(sizes, batch.features[batch.is_said(places)].square().mean(0).sqrt())


# The loop


@pytest.mark.parametrize(
    ("kind", "least"), [("eagle3", 2.5), ("mtp", 2.5), ("dflash", 2.0), ("dspark", 2.0), ("distill", 2.0)]
)
def test_a_draft_learns_what_its_target_says(kind, least, corpus, model, tmp_path):
    lesson = Lesson(tmp_path, changed(kind, epochs=40, decay=0.8 if kind in ("eagle3", "mtp") else 4.0), model, corpus)
    before, after = lesson.evaluate(), lesson.training().run()
    assert before < 1.5 < least < after
    assert lesson.num_published == 1


def test_the_batches_of_an_epoch_are_all_texts_in_an_order_of_its_own(corpus, model, tmp_path):
    lesson = Lesson(tmp_path, changed(epochs=2), model, corpus)
    lesson.training().run()
    first, second = ([number for batch in lesson.seen[start : start + 4] for number in batch] for start in (0, 4))
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second


def test_rate_rises_falls_and_the_best_draft_is_kept(corpus, model, tmp_path):
    recipe = changed(epochs=10, warmup=0.25, evaluate_every=5, patience=100)
    lesson = Lesson(tmp_path, recipe, model, corpus)
    best = lesson.training().run()
    lines = [line.split(",") for line in (tmp_path / "curve.csv").read_text().splitlines()]
    rates = [float(line[3]) for line in lines[1:]]
    measured = [float(line[-1]) for line in lines[1:] if line[-1]]
    assert np.argmax(rates) in (9, 10) and rates[0] < rates[5] < 3e-3 and rates[-1] < 1e-4
    assert len(measured) == 8 and best == max(measured)
    assert lesson.num_published == sum(now > max([0.0, *measured[:i]]) for i, now in enumerate(measured))


def test_training_ends_early_when_nothing_improves(corpus, model, tmp_path):
    lesson = Lesson(tmp_path, changed(epochs=50, learning_rate=1e-9, evaluate_every=2, patience=2), model, corpus)
    lesson.training().run()
    assert curve(tmp_path)[-1][0] == 6


def test_training_ends_when_its_time_is_up(corpus, model, tmp_path):
    Lesson(tmp_path, changed(epochs=100_000, max_minutes=0.02), model, corpus).training().run()
    *before, last = (float(line.split(",")[2]) for line in (tmp_path / "curve.csv").read_text().splitlines()[1:])
    assert max(before, default=0.0) <= 0.02 <= last


def run_alone(*arguments, launcher=()):
    """One run in a process of its own: texts, out, steps, kind."""
    subprocess.run([sys.executable, *launcher, LESSONS, *map(str, arguments)], check=True, timeout=300)


def test_a_killed_run_goes_on_to_the_same_curve(corpus, texts, model, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    running = subprocess.Popen([sys.executable, LESSONS, texts, killed, "80", "dspark"])
    while not (killed / "curve.csv").is_file() or len(curve(killed)) < 8:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    reached = len(curve(killed))
    assert 8 <= reached < 80 and list(killed.glob("step-0*"))
    recipe = changed("dspark", epochs=20, checkpoint_every=3)
    for directory in (killed, whole):
        lesson = Lesson(directory, recipe, model, corpus)
        lesson.training().run()
        assert len(lesson.seen) == 80 if directory == whole else 80 - reached <= len(lesson.seen) < 80
    assert curve(killed) == curve(whole)
    assert [each.name for each in killed.glob("step*")] == ["step-00000080"]


def test_two_processes_learn_what_one_does(corpus, texts, model, tmp_path):
    launcher = ("-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu")
    run_alone(texts, tmp_path / "two", 12, "dspark", launcher=launcher)
    Lesson(tmp_path / "one", changed("dspark", epochs=3, checkpoint_every=3), model, corpus).training().run()
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert [step for step, _ in two] == list(range(1, 13))
    np.testing.assert_allclose([loss for _, loss in two], [loss for _, loss in one], rtol=1e-4)


def test_a_loss_that_is_no_number_stops_with_the_batch_and_keeps_the_checkpoint(corpus, model, tmp_path):
    lesson = Lesson(tmp_path, changed(epochs=10, checkpoint_every=1), model, corpus)
    healthy = lesson.batch

    def poisoned(numbers, seeds):
        batch = healthy(numbers, seeds)
        return replace(batch, features=batch.features * np.nan) if len(lesson.seen) == 6 else batch

    lesson.batch = poisoned
    with pytest.raises(FloatingPointError) as failure:
        lesson.training().run()
    named = ", ".join(map(str, lesson.seen[5]))
    assert f"step 6: the loss or its gradient is not a number, in the batch of texts {named};" in str(failure.value)
    assert str(tmp_path / "step-00000005") in str(failure.value)
    assert all(torch.isfinite(each).all() for each in lesson.objective.parameters())
    lesson.batch = healthy
    lesson.training().run()
    assert curve(tmp_path)[-1][0] == 40


def test_an_mtp_recipe_with_a_vocabulary_of_its_own_is_refused():
    recipe = changed("mtp")
    recipe = replace(recipe, draft=replace(recipe.draft, num_layers=2, layers=(1,), vocabulary=200))
    with pytest.raises(ValueError, match=r"leave out draft.layers, draft.vocabulary, draft.num_layers"):
        feature_layers("mtp", recipe.draft, 4)


def test_batches_that_cannot_be_filled_are_refused(corpus, model, tmp_path):
    with pytest.raises(ValueError, match="16 texts do not fill one batch of 17"):
        Lesson(tmp_path, changed(batch=17), model, corpus).training()


# What is published


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash", "dspark"])
def test_a_draft_in_a_dtype_of_its_own_changes_no_text(kind, corpus, model, tmp_path):
    vocabulary = None if kind == "mtp" else frequent(corpus.counts(range(16), VOCAB), 200)
    objective = make_objective(changed(kind), model, vocabulary, mask_token=7)
    save_file(public_tensors(objective.net, VOCAB), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(public_config(objective.net, model.config, "a target")))
    text = max(map(corpus.text, range(16)), key=lambda text: len(text.ids) - text.start)
    prompt, answer = np.split(text.ids, [text.start])
    lm = CachedLM(model, 64)
    drafter = open_head(tmp_path, lm, dtype=torch.bfloat16)
    assert {each.dtype for layer in drafter.layers for each in layer.parameters()} == {torch.bfloat16}
    greedy = make_sampler(SamplingParams(), (), len(prompt))
    steps = list(generate(lm, drafter, prompt.tolist(), greedy, budget=8, max_tokens=len(answer)))
    assert len(answer) == 16 and [token for step in steps for token in step.tokens] == answer.tolist()
    assert sum(step.drafted for step in steps) > 0


@pytest.mark.parametrize("size", [None, 200])
@pytest.mark.parametrize(
    ("kind", "head"),
    [("eagle3", ""), ("mtp", ""), ("dflash", ""), ("dspark", "vanilla"), ("dspark", "gated"), ("dspark", "rnn")],
)
def test_what_is_published_loads_back_to_the_same_guesses(kind, head, size, corpus, model, tmp_path):
    if kind == "mtp" and size is not None:
        pytest.skip("an MTP layer guesses all of the target's tokens")
    recipe, own_head = changed(kind), size is None and kind != "mtp"
    recipe = replace(recipe, draft=replace(recipe.draft, markov_head=head or "vanilla", own_head=own_head))
    vocabulary = None if size is None else frequent(corpus.counts(range(16), VOCAB), size)
    objective = make_objective(recipe, model, vocabulary, mask_token=7)
    loud(objective.net)
    for parameter in objective.net.parameters():
        parameter.data = parameter.data.bfloat16().float()
    config = json.loads(json.dumps(public_config(objective.net, model.config, "a target")))
    save_file(public_tensors(objective.net, VOCAB), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    context, trees = as_ids(corpus.text(0).ids[:12]), []
    for make in (objective.drafter, lambda lm: open_head(tmp_path, lm)):
        lm = CachedLM(model, 64)
        drafter = make(lm)
        lm.prefill(context[:-1])
        trees.append(drafter.propose(context, Budget(12, 6, 0.0)))
    assert len(trees[0]) == 12
    np.testing.assert_array_equal(trees[0].tokens, trees[1].tokens)
    np.testing.assert_array_equal(trees[0].parents, trees[1].parents)
    np.testing.assert_allclose(trees[0].scores, trees[1].scores, atol=1e-5)
