"""Manual regions: `shard_map`, and the types that make its gradients right.

Read `variance` (what a value is along an axis), `collective` (the one table of transposes), `mixing`
(operands that must agree), `boundary` (the way in and out), then `shard_map`. `local` is what a region
computes with outside a trace.
"""
