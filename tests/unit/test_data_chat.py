"""Chat: the text and the mask are those of transformers, and only the assistant is learnt."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pfx.data import (
    CHATML,
    Batches,
    ByteTokenizer,
    ChatTemplate,
    DataError,
    Documents,
    FileTokenizer,
    IndexedDataset,
    Packed,
    encode_chat,
    load_chat_template,
    load_tokenizer,
    preprocess,
    preprocess_chat,
    train_bpe,
)
from pfx.data.chat_template import TemplateFailure

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = """{% set ns = namespace(turns=0) %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- if m.role == 'user' %}
        {{- '[INST] ' + m.content | trim + ' [/INST]' }}
    {%- else %}
        {%- set ns.turns = ns.turns + 1 -%}
        {% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=1) }}{% endif %} turns: {{ ns.turns }}"""
TEMPLATES = {"chatml": CHATML, "plain": PLAIN, "inst": INST}
TEXT = st.text(st.sampled_from("ab é🐈\n<>[]|{}%'\"\u2028\ue000"), max_size=12)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT},
    optional={"name": st.none()},
)
CHAT = st.lists(MESSAGE, min_size=1, max_size=5).filter(
    lambda chat: any(m["role"] == "assistant" for m in chat)
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    folder = tmp_path_factory.mktemp("chat")
    lines = [json.dumps({"text": f"system user assistant turns ab {i}"}) for i in range(50)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    trained = train_bpe([folder / "text.jsonl"], 300, folder / "plain.json")
    own = tokenizers.Tokenizer.from_file(trained.path)
    own.add_special_tokens(["<|im_start|>", "<|im_end|>", "</s>", "<s>"])
    own.save(str(folder / "tokenizer.json"))
    return FileTokenizer(str(folder / "tokenizer.json"), "</s>")


@pytest.fixture(scope="module")
def theirs(tokenizer: FileTokenizer) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=tokenizer.path, bos_token="<s>", eos_token="</s>"
    )


def ours(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})


def without_none(chat: list[dict]) -> list[dict]:
    return [{k: v for k, v in message.items() if v is not None} for message in chat]


@pytest.mark.parametrize("name", TEMPLATES)
@given(chat=CHAT, tools=st.booleans())
def test_text_and_tokens_are_those_of_transformers(
    tokenizer: FileTokenizer, theirs: Any, name: str, chat: list[dict], tools: bool
) -> None:
    given_tools = [{"type": "function", "name": "é<b>"}] if tools else None
    options = {"chat_template": TEMPLATES[name], "tools": given_tools}
    for prompt in (False, True):
        text = theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=prompt, **options
        )
        found = ours(name).text(without_none(chat), prompt=prompt, tools=given_tools)
        assert found == text
    marked = name != "plain"
    expected = theirs.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=marked, **options
    )
    tokens, mask = encode_chat(without_none(chat), tokenizer, ours(name), tools=given_tools)
    assert tokens.tolist() == expected["input_ids"]
    if marked:
        assert mask.tolist() == expected["assistant_masks"]


@given(CHAT)
def test_without_marks_the_turns_of_the_assistant_are_learnt(chat: list[dict]) -> None:
    chat = without_none(chat)
    text, spans = ours("plain").render(chat)
    turns = [m["content"] for m in chat if m["role"] == "assistant"]
    assert [text[a:b] for a, b in spans] == [f"{turn}<|im_end|>\n" for turn in turns]
    tokens, mask = encode_chat(chat, ByteTokenizer(), ours("plain"))
    assert ByteTokenizer().decode(tokens) == text
    learnt = ByteTokenizer().decode(tokens[mask == 1])
    assert learnt == "".join(f"{turn}<|im_end|>\n" for turn in turns)


@given(CHAT)
def test_marks_are_found_wherever_the_template_puts_them(chat: list[dict]) -> None:
    """In macros and captured blocks too, where the text is not written when it is made."""
    source = (
        "{% macro turn(m) %}{% generation %}{{ m.content }}!{% endgeneration %}{% endmacro %}"
        "{% set all %}{% for m in messages %}{{ m.role }}: "
        "{% if m.role == 'assistant' %}{{ turn(m) }}{% else %}{{ m.content }}{% endif %};"
        "{% endfor %}{% endset %}start {{ all }}"
    )
    text, spans = ChatTemplate(source).render(without_none(chat))
    turns = [m["content"] + "!" for m in chat if m["role"] == "assistant"]
    assert [text[a:b] for a, b in spans] == turns
    assert text == "start " + "".join(
        f"{m['role']}: {m['content']}{'!' * (m['role'] == 'assistant')};" for m in chat
    )


def test_a_template_that_rewrites_earlier_turns_needs_marks() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    chat = [{"role": r, "content": "x"} for r in ("user", "assistant", "user", "assistant")]
    assert ChatTemplate(source).render(chat[:2]).spans == [(17, 34)]
    with pytest.raises(TemplateFailure, match="writes message 2 or those before it differently"):
        ChatTemplate(source).render(chat)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ raise_exception('no system message') }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_reaches_nothing_but_the_messages(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(TemplateFailure, match="the template fails: "):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_that_is_no_jinja(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("a\n{% for %}")
    with pytest.raises(DataError, match=r"bad\.jinja, line 2, is no Jinja template: Expected"):
        load_chat_template(tmp_path / "bad.jinja")


def test_load_chat_template(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(DataError, match=r"has no chat template\.\n  fix: give a file with a Jinja"):
        load_chat_template(tmp_path)
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    config: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "pad_token": None,
    }
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**config, "chat_template": source}))
    for place in (tmp_path, path):
        assert load_chat_template(place).text(chat) == "<s>x</s>"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]
    path.write_text(json.dumps({**config, "chat_template": named}))
    assert load_chat_template(tmp_path).text(chat) == "<s>x</s>"
    (tmp_path / "chat_template.jinja").write_text("alone " + source)
    for place in (tmp_path, tmp_path / "chat_template.jinja"):
        assert load_chat_template(place).text(chat) == "alone <s>x</s>"
    path.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is no JSON"):
        load_chat_template(tmp_path)
    path.write_text("[]")
    with pytest.raises(DataError, match="is a list and not an object"):
        load_chat_template(tmp_path)


def chats(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


GOOD = [
    {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]},
    {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello", "name": None},
            {"role": "assistant", "content": "hi"},
            {"role": "user", "content": "bye"},
            {"role": "assistant", "content": "🐈"},
        ]
    },
]


def test_preprocess_chat(tmp_path: Path, tokenizer: FileTokenizer) -> None:
    path = chats(tmp_path / "a.jsonl", GOOD)
    summary = preprocess_chat([path], tokenizer, tmp_path / "out", template=ours("chatml"))
    tokens, mask = (IndexedDataset.open(tmp_path / name) for name in ("out", "out_mask"))
    assert mask.dtype == np.uint8
    assert (summary.documents, summary.tokens) == (2, len(tokens.tokens))
    assert summary.learnt == int(mask.tokens.sum())
    assert f"{summary.learnt} of the tokens are learnt" in str(summary)
    learnt = [tokenizer.decode(tokens[i][mask[i] == 1]) for i in range(2)]
    assert learnt == ["4", "hi🐈"], "and the special tokens that decode leaves out"
    assert [
        int((tokens[i] == tokenizer.encode("<|im_end|>")[0])[mask[i] == 1].sum()) for i in (0, 1)
    ] == [1, 2]
    # What a training step gets: labels only where the assistant wrote.
    packed = Packed(Documents.open(tmp_path / "out"), 64)
    batch = Batches(packed, packed.size)(0)
    labels = batch["labels"][batch["labels"] >= 0]
    assert sorted(labels.tolist()) == sorted(tokens.tokens[mask.tokens == 1].tolist())


def test_overwriting_chat_by_text_leaves_no_mask(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", GOOD)
    prefix = tmp_path / "out"
    preprocess_chat([path], ByteTokenizer(), prefix, template=ours("chatml"))
    with pytest.raises(DataError, match="exists"):
        preprocess_chat([path], ByteTokenizer(), prefix, template=ours("chatml"))
    chats(path, [{"text": "abc"}])
    preprocess([path], ByteTokenizer(), prefix, overwrite=True)
    documents = Documents.open(prefix)
    assert documents.mask is None
    assert documents.num_tokens == 4


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([], "a list and not an object"),
        ({"text": "x"}, 'no key "messages"; it has "text"'),
        ({"messages": "x"}, '"messages" is a str and not a list'),
        ({"messages": [{"content": "x"}]}, 'message 1 is no object with a "role"'),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message of the assistant"),
        ({"messages": []}, "no message of the assistant"),
        (
            {"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "the template fails: no tools here",
        ),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "hold half of a surrogate"),
        ({"messages": [{"role": "assistant"}]}, "the template marks nothing that is learnt"),
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, record: Any, reason: str) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
        "{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    path = chats(tmp_path / "a.jsonl", [GOOD[0], record])
    summary = preprocess_chat(
        [path], ByteTokenizer(), tmp_path / "o", template=ChatTemplate(source)
    )
    assert summary.documents == 1
    (bad,) = summary.bad
    assert bad.line == 2
    assert reason in bad.reason


def test_what_goes_to_workers_comes_back_the_same(tokenizer: FileTokenizer) -> None:
    template = pickle.loads(pickle.dumps(ours("chatml")))
    assert template == ours("chatml")
    chat = GOOD[1]["messages"][:1] + GOOD[1]["messages"][2:]
    for a, b in zip(
        encode_chat(chat, load_tokenizer(tokenizer.path), template),
        encode_chat(chat, tokenizer, ours("chatml")),
        strict=True,
    ):
        assert a.tolist() == b.tolist()
