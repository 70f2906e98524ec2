"""Calls as what they add to each other, to calls with whole prompts, in memory of the order of the distinct tokens.

A call whose prompt starts with all of its base's prompt + response goes on where the base ends. Such calls are a chain,
and the tokens of a chain stand in one array, of which every prompt is a view from the start on:

    call 0: new [1 2 3], sampled [4]                    prompt ids_T[:3], response ids_T[3:4]
    call 1: base 0, 4 shared, new [5], sampled [6 7]    prompt ids_T[:5], response ids_T[5:7]

A call that starts anywhere else (from a part of its base, or where another one went on already) begins a chain of its
own, with one copy of what it shares. Pure. Shape legend: T tokens of one chain.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import orjson

from manege.store.base import StoredCall
from manege.store.codec import make_call
from manege.types import Call, IntArray

__all__ = ["Link", "expand", "find_chains", "link_of", "place"]


class Link(NamedTuple):
    """Where the tokens of a call belong; the first two as in `StoredCall`."""

    base: int | None
    num_shared: int
    num_new: int
    """Tokens of the prompt after the shared ones."""
    num_sampled: int


def link_of(stored: StoredCall) -> Link:
    """A stored call without its contents."""
    return Link(stored.base, stored.num_shared, len(stored.new_ids_N), len(stored.response_ids_R))


def expand(stored: Sequence[StoredCall]) -> list[Call]:
    """The calls of one rollout with whole prompts, in the same order. Arrays of ids are read-only views."""
    links = [link_of(each) for each in stored]
    chains = find_chains(links)
    added = [
        [ids for position in chain for ids in (stored[position].new_ids_N, stored[position].response_ids_R)]
        for chain in chains
    ]
    return [
        make_call(orjson.loads(each.record), prompt_ids_P=prompt, response_ids_R=response, logprobs_R=each.logprobs_R)
        for each, (prompt, response) in zip(stored, place(links, chains, added), strict=True)
    ]


def find_chains(links: Sequence[Link]) -> list[list[int]]:
    """Positions of the calls of each chain. Chains stand in the order of their first calls, so that one begins after
    the call that it shares tokens with. Raises ValueError where a base is no earlier call or has too few tokens."""
    chains: list[list[int]] = []
    chain_of: list[int] = []
    ends: list[int] = []
    """Length of prompt + response, per call."""
    for position, (base, num_shared, num_new, num_sampled) in enumerate(links):
        if min(num_shared, num_new, num_sampled) < 0 or not (base is None or 0 <= base < position):
            raise ValueError(f"call {position} cannot be {links[position]}")
        if num_shared > (0 if base is None else ends[base]):
            raise ValueError(f"call {position} shares more tokens than there are: {links[position]}")
        if base is not None and num_shared == ends[base] and chains[chain_of[base]][-1] == base:
            chain_of.append(chain_of[base])
        else:
            chain_of.append(len(chains))
            chains.append([])
        chains[chain_of[position]].append(position)
        ends.append(num_shared + num_new + num_sampled)
    return chains


def place(
    links: Sequence[Link], chains: Sequence[Sequence[int]], added: Sequence[Sequence[IntArray]]
) -> list[tuple[IntArray, IntArray]]:
    """Per call, prompt and response. `added` has, per chain, arrays that are together the new and sampled tokens of its
    calls; a single one is not copied when the chain shares nothing."""
    chain_ids: dict[int, IntArray] = {}
    """Per call, all tokens of its chain."""
    found: dict[int, tuple[IntArray, IntArray]] = {}
    for chain, parts in zip(chains, added, strict=True):
        base, end, *_ = links[chain[0]]
        shared = [] if base is None or end == 0 else [chain_ids[base][:end]]
        ids_T = _joined([*shared, *parts])
        for position in chain:
            start = end + links[position].num_new
            end = start + links[position].num_sampled
            chain_ids[position] = ids_T
            found[position] = ids_T[:start], ids_T[start:end]
    return [found[position] for position in range(len(links))]


def _joined(parts: Sequence[IntArray]) -> IntArray:
    if len(parts) == 1:
        return parts[0]
    joined = np.concatenate(parts)
    joined.flags.writeable = False
    return joined
