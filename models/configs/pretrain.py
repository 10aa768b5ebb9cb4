"""Pretrain a small Llama on one's own text.

python models/python_docs.py data/docs.jsonl        # or any JSONL: {"text": "..."} a line
pfx tokenizer data/docs.jsonl --vocab-size 4096 --output data/tokenizer.json
pfx preprocess data/docs.jsonl --tokenizer data/tokenizer.json --output data/docs
pfx train models/configs/pretrain.py
"""

from __future__ import annotations

import pfx
from models import llama
from pfx.recipe import Checkpoint, Data, Evaluate, Model, Optimizer, Run, Train


def config() -> Run:
    """Two million parameters: minutes on a laptop."""
    return Run(
        directory="runs/pretrain",
        model=Model(
            module="models.llama",
            config=llama.Config(
                num_layers=4,
                embed_dim=128,
                num_heads=4,
                num_kv_heads=4,
                head_dim=32,
                mlp_dim=384,
                vocab_size=4096,
                max_seq_len=128,
            ),
        ),
        data=Data(
            prefixes=("data/docs",),
            seq_len=128,
            split=(0.98, 0.02),
            tokenizer="data/tokenizer.json",
        ),
        optimizer=Optimizer(lr=2e-3, warmup_steps=50, min_lr=2e-4, options={"b2": 0.95}),
        plan=pfx.Plan(),  # precision="bf16" on a GPU
        train=Train(steps=300, batch_size=16),
        evaluate=Evaluate(every=50, batches=20),
        checkpoint=Checkpoint(every=100, keep=2),
    )
