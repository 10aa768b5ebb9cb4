"""Text to token ids and back: bytes, or any file of the `tokenizers` package."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from pfx.data.error import DataError
from pfx.errors import message

END_OF_DOCUMENT = "<|endoftext|>"
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>")


class Tokenizer(Protocol):
    """What preprocessing and sampling need; it goes to worker processes by pickle."""

    @property
    def vocab_size(self) -> int:
        """The largest id + 1."""
        ...

    @property
    def eod_id(self) -> int | None:
        """The token that ends a document, if there is one."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text, and (ids, 2) where in it each begins and ends, in characters."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; 256 ends a document.

    >>> ByteTokenizer().encode("hé"), ByteTokenizer().decode([104, 195, 169, 256])
    (array([104, 195, 169], dtype=uint8), 'hé')
    """

    @property
    def vocab_size(self) -> int:
        """257."""
        return 257

    @property
    def eod_id(self) -> int:
        """256, which is no byte."""
        return 256

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode(), np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of a text, and (bytes, 2) the range of the character each is of."""
        widths = [len(character.encode()) for character in text]
        begin = np.repeat(np.arange(len(text)), widths)
        return self.encode(text), np.stack([begin, begin + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; ids that are no bytes are left out, broken characters replaced."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class FileTokenizer:
    """A ``tokenizer.json`` of the `tokenizers` package.

    Encodes without the special tokens that a template of the file would add. The names of special
    tokens in a text become those tokens, as everywhere in that package.

    Args:
        path: the file.
        eod: the token that ends a document; None takes the first that the file has of
            ``<|endoftext|>``, ``<|end_of_text|>``, ``</s>``, ``<eos>``, ``<|eos|>``, ``[EOS]``.

    Raises:
        DataError: the file is none that `tokenizers` reads, or has no token `eod`.
    """

    path: str
    eod: str | None = None

    def __post_init__(self) -> None:
        if self.eod is not None and self._tokenizer.token_to_id(self.eod) is None:
            what = f'has no token "{self.eod}".'
            ends = [name for name in _END_NAMES if self._tokenizer.token_to_id(name) is not None]
            fix = f"eod={ends[0]!r}" if ends else "name a token that it has"
            raise DataError(message(self.path, what, fix=fix))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "eod": self.eod}  # each process reads the file itself

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizers = import_tokenizers()
        try:
            tokenizer = tokenizers.Tokenizer.from_file(self.path)
        except Exception as error:  # the package raises plain Exception
            raise DataError(message(self.path, f"is no tokenizer: {error}.")) from error
        # Kept in the file, and would cut and pad every document.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """The largest id + 1, added tokens included."""
        return self._vocab_size

    @property
    def eod_id(self) -> int | None:
        """The id of the token that ends a document."""
        return self._eod_id

    @cached_property
    def _vocab_size(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def _eod_id(self) -> int | None:
        names = _END_NAMES if self.eod is None else (self.eod,)
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((found for found in ids if found is not None), None)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text, and (ids, 2) where in it each begins and ends, in characters."""
        text.encode()  # half of a surrogate pair is a UnicodeEncodeError, as for bytes
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        return np.array(encoded.ids, np.int64), offsets

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return self._tokenizer.decode([int(i) for i in ids])


def load_tokenizer(name: str | os.PathLike[str], *, eod: str | None = None) -> Tokenizer:
    """Return the tokenizer of a name: "bytes", or the path of a ``tokenizer.json``.

    Args:
        name: "bytes", a file, or a folder that holds a ``tokenizer.json``.
        eod: the token that ends a document, of a file; see `FileTokenizer`.

    Raises:
        DataError: there is no such file, or it is none that `tokenizers` reads.

    >>> load_tokenizer("bytes").vocab_size
    257
    """
    path = os.fspath(name)
    if path == "bytes":
        if eod is not None:
            raise DataError(message("load_tokenizer: eod", "is given by the bytes tokenizer, 256."))
        return ByteTokenizer()
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    if not os.path.isfile(path):
        fix = 'give "bytes" or the path of a tokenizer.json'
        raise DataError(message(f"load_tokenizer: {path}", "is no file.", fix=fix))
    tokenizer = FileTokenizer(path, eod)
    _ = tokenizer.vocab_size  # read it here, where the error belongs
    return tokenizer


def import_tokenizers() -> Any:
    """Return the package `tokenizers`, or say how to install it."""
    try:
        import tokenizers
    except ImportError as error:
        what, fix = "needs the package tokenizers.", "pip install 'pfx[data]'"
        raise ImportError(message("a tokenizer file", what, fix=fix)) from error
    return tokenizers
