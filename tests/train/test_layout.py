"""Shards have every element once, in canonical order."""

from hypothesis import given
from hypothesis import strategies as st

from irdmafs.train.layout import ALIGN, Parameter, cut


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
