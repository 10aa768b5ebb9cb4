"""Where an instruction comes from, for the people who read the program."""

from __future__ import annotations

import torch
import torch.fx

Node = torch.fx.Node


def roles_of(node: Node) -> list[str]:
    """The labelled role of each result of a node."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [node.meta.get("role", "")]
    roles = [""] * len(value)
    for item in node.users:
        roles[item.args[1]] = item.meta.get("role", "")  # type: ignore[index]
    return roles


def reason_of(node: Node) -> str:
    """Why a node moves its operands."""
    name = str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")
    return f"an operand of {name}"


def source_of(node: Node) -> str:
    """The source line of a node; of a backward node, that of the nearest forward ancestor."""
    line = node.meta.get("source")
    if line:
        return line
    seen, queue = {node}, list(node.all_input_nodes)
    while queue:
        current = queue.pop(0)
        if current.meta.get("source"):
            return f"grad of {current.meta['source']}"
        for parent in current.all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return ""
