"""Reference models: pure functions over nested dicts of tensors, one file a family.

Read `gpt` first, then `llama`; `common` holds what both share, `sampling` writes text with them, and
`hf` reads and writes their weights in the files of transformers.
"""
