"""A policy that acts for many workers: one Ray actor answers their observations in batches, on a GPU if it has one.

For models too large for every worker to hold. Workers use `RemotePolicy` in place of the policy.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.models.policy import Policy
from deft.runs.random_state import get_random_state, set_random_state
from deft.training.cluster.blocks import load_packed, pack_leaves, unpack_tensor

LARGE_POLICY = 20_000_000  # parameters from which on `inference: auto` takes an actor of its own
GATHERING = 0.002  # seconds that a request waits for others, to be answered in one batch


def unpack(packed: dict[Any, Any], num_rows: int) -> TensorDict:
    """The inverse of `pack_leaves`."""
    td = TensorDict({}, batch_size=[num_rows])
    for key, value in packed.items():
        td.set(key, unpack_tensor(value).clone())
    return td


class InferenceActor:
    """Holds the policy; `act` and `value` wait shortly for further requests and answer them in one batch.

    Requests carry the reference to the weights: an actor that was restarted finds its way by itself. Of several
    versions requested, the newest acts for all.
    """

    def __init__(self, policy: Policy, device: str) -> None:
        self.device = torch.device(device)
        self.policy = policy.requires_grad_(False).to(self.device)
        self.version = -1
        self._waiting: dict[str, list[tuple[dict[Any, Any], int, asyncio.Future]]] = {"act": [], "get_value": []}

    async def ask(
        self,
        method: str,
        packed: dict[Any, Any],
        num_rows: int,
        version: int,
        weights: list[Any],
        random: dict[str, Any] | None = None,
    ) -> tuple[dict[Any, Any], int, dict[str, Any] | None]:
        """What `method` of the policy adds to these rows, the version that answered, and the random state after it."""
        if version > self.version:
            loaded = await weights[0]
            if version > self.version:  # newer weights may have arrived since
                load_packed(self.policy, loaded)
                self.version = version
        if random is not None:  # alone, as in the process that the random state is from
            set_random_state(random)
            return self._answer(method, [(packed, num_rows)])[0], self.version, get_random_state()
        future = asyncio.get_running_loop().create_future()
        queue = self._waiting[method]
        queue.append((packed, num_rows, future))
        if len(queue) == 1:
            asyncio.get_running_loop().call_later(GATHERING, self._serve, method)
        return await future, self.version, None

    def _serve(self, method: str) -> None:
        requests, self._waiting[method] = self._waiting[method], []
        try:
            answers = self._answer(method, [(packed, num_rows) for packed, num_rows, _ in requests])
        except Exception as error:
            for _, _, future in requests:
                future.set_exception(error)
            return
        for (_, _, future), answer in zip(requests, answers, strict=True):
            future.set_result(answer)

    @torch.inference_mode()
    def _answer(self, method: str, requests: list[tuple[dict[Any, Any], int]]) -> list[dict[Any, Any]]:
        parts = [unpack(packed, num_rows) for packed, num_rows in requests]
        whole: Any = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(self.device)
        if method == "get_value":
            result = TensorDict({schema.VALUE: self.policy.get_value(whole).float()}, batch_size=whole.batch_size)
        else:
            acted = self.policy.act(whole)
            result = acted.exclude(schema.OBSERVATION, schema.MEMORY, schema.ACTION_MASK)
        return [pack_leaves(part) for part in result.cpu().split([num_rows for _, num_rows in requests])]


class RemotePolicy(Policy):
    """The policy of an inference actor, as a worker's collector sees it."""

    def __init__(self, actor: Any, policy: Policy) -> None:
        super().__init__()
        self.actor = actor
        self.recurrent, self.chunk_length = policy.recurrent, policy.chunk_length
        self.needs_reward = policy.needs_reward
        memory = policy.initial_memory(1)
        self._memory = None if memory is None else memory.cpu()
        self._place = nn.Parameter(torch.zeros(1), requires_grad=False)  # on the CPU, where the workers are
        self._version, self._weights = -1, [None]
        self._exact = False

    def use_weights(self, version: int, weights: list[Any], exact: bool) -> None:
        """Set the weights of the next requests; `exact`: each is answered alone, with this process's random state."""
        self._version, self._weights, self._exact = version, weights, exact

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Ask the actor for actions."""
        for key, value in self._ask("act", td).items():
            td.set(key, unpack_tensor(value).clone())
        return td

    def get_value(self, td: TensorDictBase) -> Tensor:
        """Ask the actor for V."""
        return unpack_tensor(self._ask("get_value", td)[schema.VALUE]).clone()

    def initial_memory(self, num_envs: int) -> Any:
        """Zeros, or None without memory."""
        if self._memory is None:
            return None
        return torch.cat([self._memory] * num_envs) if num_envs > 1 else self._memory.clone()

    def _ask(self, method: str, td: TensorDictBase) -> dict[Any, Any]:
        import ray

        random = get_random_state() if self._exact else None
        answer, _, after = ray.get(
            self.actor.ask.remote(method, pack_leaves(td), td.batch_size[0], self._version, self._weights, random)
        )
        if after is not None:
            set_random_state(after)
        return answer
