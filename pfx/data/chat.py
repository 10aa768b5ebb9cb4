"""Chat messages to tokens and a loss mask: only what the assistant wrote is learnt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pfx.data.chat_template import ChatTemplate, TemplateFailure
from pfx.data.documents import MASK_SUFFIX
from pfx.data.indexed import dtype_for
from pfx.data.preprocess import OnBad, Progress, Summary, run
from pfx.data.tokenizer import Tokenizer
from pfx.data.workers import Columns


@dataclass(frozen=True)
class ChatEncoder:
    """Records with messages to tokens and a mask."""

    tokenizer: Tokenizer
    template: ChatTemplate
    key: str

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """The dtypes of tokens and mask."""
        return dtype_for(self.tokenizer.vocab_size), np.dtype(np.uint8)

    def encode(self, records: list[Any]) -> list[Columns | str]:
        """Return tokens and mask of each record, or why it has none."""
        return [self._encode(record) for record in records]

    def _encode(self, record: Any) -> Columns | str:
        messages, reason = messages_of(record, self.key)
        if reason:
            return reason
        variables = {"tools": record["tools"]} if record.get("tools") else {}
        try:
            tokens, mask = encode_chat(messages, self.tokenizer, self.template, **variables)
        except TemplateFailure as error:
            return str(error)
        except UnicodeEncodeError:
            return f'"{self.key}" hold half of a surrogate pair'
        if not mask.any():
            return "the template marks nothing that is learnt"
        return tokens, mask


def messages_of(record: Any, key: str) -> tuple[list[dict[str, Any]], str]:
    """Return the messages under a key of a record and "", or none and why there are none.

    Entries of a message that are null are left out.
    """
    if not isinstance(record, dict):
        return [], f"a {type(record).__name__} and not an object"
    if key not in record:
        names = ", ".join(f'"{name}"' for name in list(record)[:8])
        return [], f'no key "{key}"; it has {names or "none"}'
    messages = record[key]
    if not isinstance(messages, list):
        return [], f'"{key}" is a {type(messages).__name__} and not a list'
    for number, one in enumerate(messages, 1):
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            return [], f'message {number} is no object with a "role"'
    if all(one["role"] != "assistant" for one in messages):
        return [], "no message of the assistant, so nothing to learn"
    return [{k: v for k, v in one.items() if v is not None} for one in messages], ""


def encode_chat(
    messages: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    **variables: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a conversation, and 1 for each that is learnt.

    A token is learnt if a character of it is.

    Args:
        messages: dicts with a "role" and usually a "content".
        tokenizer: the model's.
        template: the model's.
        variables: for the template, such as ``tools``.

    Raises:
        TemplateFailure: the template refuses the conversation.

    >>> from pfx.data import CHATML, ByteTokenizer, ChatTemplate
    >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    >>> tokens, mask = encode_chat(chat, ByteTokenizer(), ChatTemplate(CHATML))
    >>> ByteTokenizer().decode(tokens[mask == 1])
    '4<|im_end|>'
    """
    text, spans = template.render(messages, **variables)
    tokens, offsets = tokenizer.encode_with_offsets(text)
    mask = np.zeros(len(tokens), np.uint8)
    for start, end in spans:
        if start == end:
            continue  # nothing was written there, and a token around it is another's
        mask[(offsets[:, 0] < end) & (offsets[:, 1] > start)] = 1
    return tokens, mask


def preprocess_chat(
    files: Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    prefix: str | os.PathLike[str],
    *,
    template: ChatTemplate,
    key: str = "messages",
    workers: int | None = None,
    on_bad: OnBad = "collect",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Tokenize conversations to ``PREFIX.bin``, and what is learnt of them to ``PREFIX_mask.bin``.

    Each record is an object with a list of messages under `key`, and perhaps "tools". Nothing is cut
    and nothing added to what the template writes. Lines that give no conversation with something to
    learn are left out and counted as bad.

    Args:
        files: JSONL files.
        tokenizer: the model's, from `load_tokenizer`.
        prefix: what the names of the files begin with; `Documents.open` finds both pairs.
        template: the model's, from `load_chat_template`.
        key: of the messages in each record.
        workers, on_bad, overwrite, progress: as in `preprocess`.

    Raises:
        DataError: a file cannot be read, the output exists, or a line is bad and `on_bad` is "stop".
    """
    prefixes = [os.fspath(prefix), os.fspath(prefix) + MASK_SUFFIX]
    return run(
        files, ChatEncoder(tokenizer, template, key), prefixes, workers=workers, on_bad=on_bad,
        overwrite=overwrite, progress=progress,
    )  # fmt: skip
