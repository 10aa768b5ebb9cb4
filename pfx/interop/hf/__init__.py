"""Weights in the files that Hugging Face's libraries read and write.

This package knows how files and trees of tensors meet: a `Table` says how the parameters of a model
are called there and how they lie. Which models there are it does not know; a model brings its table
and reads its own config.json, as `models.hf` does for those of `models`.
"""

from pfx.interop.hf.config import Fields as Fields
from pfx.interop.hf.config import read_config_json as read_config_json
from pfx.interop.hf.fused import merge as merge
from pfx.interop.hf.fused import split as split
from pfx.interop.hf.load import load_params as load_params
from pfx.interop.hf.problems import WeightsError as WeightsError
from pfx.interop.hf.save import save_params as save_params
from pfx.interop.hf.table import Table as Table
from pfx.interop.hf.together import together as together
from pfx.interop.hf.tokenizer import chat_template as chat_template
from pfx.interop.hf.tokenizer import copy_tokenizer as copy_tokenizer
from pfx.interop.hf.tokenizer import special_tokens as special_tokens
from pfx.interop.hf.tokenizer import tokenizer_file as tokenizer_file
