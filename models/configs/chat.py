"""Fine-tune Hugging Face weights on conversations, with the loss on what the assistant writes.

    pfx preprocess chats.jsonl --chat --tokenizer weights --output data/chats
    pfx train models/configs/chat.py
    pfx convert runs/chat tuned --tokenizer weights

``weights`` is a folder with the config.json, safetensors and tokenizer of a GPT-2, Llama or Qwen3; a
line of ``chats.jsonl`` is ``{"messages": [{"role": "user", "content": "..."}, ...]}``.
"""

from __future__ import annotations

import pfx
from models import hf
from pfx.recipe import Checkpoint, Data, Model, Optimizer, Run, Train

WEIGHTS = "weights"


def config() -> Run:
    """Whole conversations packed into rows, each seeing itself only."""
    sizes = hf.read_config(WEIGHTS)
    return Run(
        directory="runs/chat",
        model=Model(
            module=hf.family_of(sizes).__name__,
            config=sizes,
            weights=WEIGHTS,
        ),
        data=Data(
            prefixes=("data/chats",),
            split=(1.0, 0.0),
            seq_len=min(1024, sizes.max_seq_len),
            packing="packed",
            reset_positions=True,
            block_diagonal=True,
            tokenizer=WEIGHTS,
        ),
        optimizer=Optimizer(lr=1e-5, warmup_steps=10, weight_decay=0.0),
        plan=pfx.Plan(precision="bf16"),
        train=Train(steps=200, batch_size=8),
        checkpoint=Checkpoint(every=100, keep=1),
    )
