"""Shards have every element once, in canonical order; each store node is primary of as many as others."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irdmafs.train.layout import ALIGN, Parameter, cut
from irdmafs.train.placement import choose, host_of, shard_names


@given(
    st.lists(st.lists(st.integers(0, 300), max_size=2), min_size=1, max_size=8), st.integers(1, 6)
)
def test_cut_covers_every_element_once(shapes: list[list[int]], shards: int) -> None:
    parameters = [
        Parameter(f"p{number}", "F32", tuple(shape), "model.safetensors")
        for number, shape in enumerate(shapes)
    ]
    found = cut(parameters, [str(number) for number in range(shards)], 1)
    covered = [
        (part.parameter.name, part.start, part.stop) for shard in found for part in shard.slices
    ]
    for parameter in parameters:
        position = 0
        for name, start, stop in covered:
            if name == parameter.name:
                assert start == position
                assert start % ALIGN == 0
                position = stop
        assert position == parameter.size
    for shard in found:
        at = 0
        for part in shard.slices:
            assert part.at == at
            at += part.stop - part.start
        assert shard.size == at


@pytest.mark.parametrize("nodes", [1, 2, 3, 7])
@pytest.mark.parametrize("shards", [1, 2, 3, 7, 14, 20])
def test_every_node_is_primary_of_as_many_shards(nodes: int, shards: int) -> None:
    names = {str(n): f"node{n * n % 11 % nodes}" for n in range(200)}
    chosen = choose(names, shards)
    assert len(set(chosen)) == len(chosen) == shards
    counts = Counter(names[name] for name in chosen)
    assert max(counts.values()) - min(counts.get(node, 0) for node in set(names.values())) <= 1


def test_choice_depends_on_nothing_but_the_names_and_nodes() -> None:
    names = {"0": "b", "1": "a", "2": "a", "3": "b", "4": "a"}
    assert choose(names, 4) == ["1", "0", "2", "3"]
    assert choose(names, 5) == ["1", "0", "2", "3", "4"]


def test_node_with_few_names_gets_those() -> None:
    names = {**{str(n): "a" for n in range(10)}, "10": "b"}
    assert Counter(names[name] for name in choose(names, 6)) == {"a": 5, "b": 1}
    with pytest.raises(ValueError, match="11 names are too few for 12 shards"):
        choose(names, 12)


def test_shards_are_numbered_where_there_are_no_store_nodes(tmp_path: Path) -> None:
    assert shard_names(tmp_path, None, 1 << 30) == (["0"], 1)
    assert shard_names(tmp_path, 3, 0) == (["0", "1", "2"], 3)
    assert os.listdir(tmp_path) == []


def test_it_is_not_known_where_a_file_is_that_no_store_node_keeps(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert host_of(tmp_path / "file") is None
    assert host_of(tmp_path / "missing") is None
