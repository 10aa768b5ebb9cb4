"""Reference models: pure functions over nested dicts of tensors, one file a family.

Read `gpt` first, then `llama`; `common` holds what both share.
"""
