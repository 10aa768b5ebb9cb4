"""Text to batches: tokenize once to files that are mapped, then read any step's batch by its number.

`preprocess`, or `preprocess_chat` for conversations, writes a ``.bin`` and ``.idx`` pair.
`Documents` opens one, and splits it. `Windows` or `Packed` cut documents into rows, a `Blend` mixes
several of these, and `Batches` gives any step's.
"""

from pfx.data.batches import Batches as Batches
from pfx.data.blend import Blend as Blend
from pfx.data.bpe import train_bpe as train_bpe
from pfx.data.chat import encode_chat as encode_chat
from pfx.data.chat import preprocess_chat as preprocess_chat
from pfx.data.chat_template import CHATML as CHATML
from pfx.data.chat_template import ChatTemplate as ChatTemplate
from pfx.data.chat_template import load_chat_template as load_chat_template
from pfx.data.documents import Documents as Documents
from pfx.data.error import DataError as DataError
from pfx.data.indexed import IndexedDataset as IndexedDataset
from pfx.data.indexed import dtype_for as dtype_for
from pfx.data.indexed_writer import IndexedWriter as IndexedWriter
from pfx.data.jsonl import BadLine as BadLine
from pfx.data.jsonl import iterate_texts as iterate_texts
from pfx.data.packed import Packed as Packed
from pfx.data.preprocess import Summary as Summary
from pfx.data.preprocess import preprocess as preprocess
from pfx.data.progress import progress_bar as progress_bar
from pfx.data.samples import SampleId as SampleId
from pfx.data.samples import Samples as Samples
from pfx.data.tokenizer import ByteTokenizer as ByteTokenizer
from pfx.data.tokenizer import FileTokenizer as FileTokenizer
from pfx.data.tokenizer import Tokenizer as Tokenizer
from pfx.data.tokenizer import load_tokenizer as load_tokenizer
from pfx.data.windows import Windows as Windows
