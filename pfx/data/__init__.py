"""Text to batches: tokenize once to files that are mapped, then read any step's batch by its number.

`preprocess` (or `preprocess_chat`) writes a ``.bin`` and ``.idx`` pair.
"""

from pfx.data.bpe import train_bpe as train_bpe
from pfx.data.error import DataError as DataError
from pfx.data.indexed import IndexedDataset as IndexedDataset
from pfx.data.indexed import dtype_for as dtype_for
from pfx.data.indexed_writer import IndexedWriter as IndexedWriter
from pfx.data.jsonl import BadLine as BadLine
from pfx.data.jsonl import iterate_texts as iterate_texts
from pfx.data.preprocess import Summary as Summary
from pfx.data.preprocess import preprocess as preprocess
from pfx.data.tokenizer import ByteTokenizer as ByteTokenizer
from pfx.data.tokenizer import FileTokenizer as FileTokenizer
from pfx.data.tokenizer import Tokenizer as Tokenizer
from pfx.data.tokenizer import load_tokenizer as load_tokenizer
