"""Chat templates of every temper: no system role, strict alternation, none at all; one BOS whoever writes it."""

import pytest
from tiny import tiny_model
from tiny_tokenizer import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from app.session import Session
from app.template import render
from specexec.lm import CachedLM

SYSTEM, ASK, REPLY = ({"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant"))
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SILENT = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def rendered(template, *messages):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return render(tokenizer, messages)


@pytest.mark.parametrize("template", [NO_SYSTEM, SILENT, STRICT])
def test_without_a_system_role_the_user_says_it(template):
    assert rendered(template, SYSTEM, ASK, REPLY, ASK) == (
        "[user]system says\n\nuser says[assistant]assistant says[user]user says"
    )
    assert rendered(template, SYSTEM) == "[user]system says"


def test_turns_of_one_role_are_joined_where_roles_must_alternate():
    assert rendered(STRICT, ASK, ASK, REPLY) == "[user]user says\n\nuser says[assistant]assistant says"
    assert rendered(SILENT, ASK, ASK) == "[user]user says[user]user says"


def test_what_no_form_satisfies_is_refused_in_the_templates_words():
    with pytest.raises(ValueError, match="refuses the messages: roles must alternate"):
        rendered(STRICT, REPLY, ASK)


def test_no_template_is_said_with_a_way_out():
    with pytest.raises(ValueError, match="no chat template.*/v1/completions"):
        rendered(None, ASK)


@pytest.mark.parametrize("template_writes", [True, False])
@pytest.mark.parametrize("tokenizer_adds", [True, False])
def test_one_bos_whoever_writes_it(template_writes, tokenizer_adds):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}" * template_writes + SILENT
    if tokenizer_adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
        )
    lm = CachedLM(tiny_model("llama"), 64, vocab_size=len(tokenizer))
    ids = Session(lm, None, tokenizer, ctx=32, budget=4, stop_ids=frozenset()).encode_chat([ASK])
    assert ids.count(tokenizer.bos_token_id) == (template_writes or tokenizer_adds)
    assert ids[0] == tokenizer.bos_token_id or not (template_writes or tokenizer_adds)
