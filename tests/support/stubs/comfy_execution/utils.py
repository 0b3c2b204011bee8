"""Which node is running now."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import NamedTuple


class ExecutionContext(NamedTuple):
    prompt_id: str
    node_id: str
    list_index: int | None


current_executing_context: ContextVar[ExecutionContext | None] = ContextVar("running_node", default=None)


def get_executing_context() -> ExecutionContext | None:
    return current_executing_context.get()


class CurrentNodeContext:
    def __init__(self, prompt_id: str, node_id: str, list_index: int | None = None):
        self.context = ExecutionContext(prompt_id, node_id, list_index)
        self.token: Token | None = None

    def __enter__(self) -> CurrentNodeContext:
        self.token = current_executing_context.set(self.context)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.token is not None:
            current_executing_context.reset(self.token)
